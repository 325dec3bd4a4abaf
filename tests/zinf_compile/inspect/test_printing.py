"""The text of a plan: the exact text of the small plan, and properties of folding and diffs for larger plans."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from expecttest import TestCase

from tests.support.hand_made_plans import narrow, with_transfers
from zinf_compile.inspect.plan_difference import dump_plan_difference
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.ir.copies import Role
from zinf_compile.ir.glossary import ActivationPolicy, Phase, Tier, format_seconds
from zinf_compile.ir.hardware import make_route
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.schedule import Schedule


class GoldenTest(TestCase):
    @pytest.fixture(autouse=True)
    def _take_plan(self, small_plan: Plan) -> None:
        self.plan = small_plan

    def test_the_small_plan(self) -> None:
        self.assertExpectedInline(
            dump_plan(self.plan),
            """\
plan v10  small  training
  compute in each parameter's own dtype; 12 ticks: 6 forward, 6 backward; rates of paper

tiers     capacity     peak  used  made of
  device    1000 B    752 B   75%  arena 512 B, activations 160 B, residents 80 B
  host     2.0 KiB  1.0 KiB   51%  staging 800 B, homes 240 B
  nvme    the disk  1.6 KiB     -  homes 1.6 KiB

placement              count    bytes  compute  master  gradient  optimizer
  embed.weight             1    256 B  device   -       host      host
  layers.{0,1}.bias        2     64 B  device   -       host      host
  layers.{0,1}.weight      2  1.6 KiB  nvme     -       nvme      nvme

transfers  4 of 800 B in all, at most 400 B ahead of compute
  issue -> need by -> release  route           name      bytes  arena, bytes
      0 ->       1 ->       3  nvme -> device  layers.0  200 B  [  0, 200)
      1 ->       3 ->       5  nvme -> device  layers.1  200 B  [256, 456)
      6 ->       7 ->       9  nvme -> device  layers.1  200 B  [256, 456)
      7 ->       9 ->      11  nvme -> device  layers.0  200 B  [  0, 200)

arena  512 B, ranges in bytes; a column is a tick, - moving, # in use, | backward begins
                     ......|.....
  device [  0, 200)  -##....--##.  layers.0
  device [256, 456)  .--##.-##...  layers.1
  device [456, 512)  .#####.###..  5 bound values

bound        5 of compute's values in 56 B of the arena
             the largest is mm: 56 B in ticks [7, 9)
activations  policy save: 120 B saved for backward
             outside of the arena at most 160 B, at tick 5 (forward, loss)
gradients    1 of 64 B to host, 2 of 400 B to nvme; the last leaves after tick 11
             backwards add up there in float32
step         120 elements in 4 chunks of 25
             reads 1.6 KiB, writes 1.2 KiB, staging 800 B

predicted     time  compute  stalls  longest stalls
  forward   7.00 s   6.00 s  1.00 s  layers.0 1.00 s
  backward  12.0 s   6.00 s  6.00 s  gradient layers.0.weight 5.00 s, layers.1 1.00 s
  step      40.0 s   12.0 s  28.0 s  optimizer state 28.0 s
  total     59.0 s   24.0 s  35.0 s

routes            moves    bytes     busy  of the step
  device -> host      1     64 B  64.0 ms           0%
  device -> nvme      2    400 B   8.00 s          14%
  host -> nvme        1  1.2 KiB   24.0 s          41%
  nvme -> device      4    800 B   8.00 s          14%
  nvme -> host        1  1.6 KiB   16.0 s          27%

bound by     nvme, busy 56.0 s of 59.0 s (95%)
critical     24.0 s of host -> nvme: optimizer state 24.0 s
             16.0 s of nvme -> host: optimizer state 16.0 s
             8.00 s of device -> nvme: gradient layers.0.weight 4.00 s, gradient layers.1.weight ...
SSD writes   1.6 KiB per step, 2.2 MiB per day

device at its peak of 752 B, tick 5  role        bytes
  idle arena                         reserve     472 B
  outside of the arena, in loss      activation  160 B
  embed.weight                       parameter    64 B
  linear_1                           activation   40 B
  layers.0.bias                      parameter     8 B
  1 more                                           8 B""",
        )

    def test_ranks(self) -> None:
        hardware = replace(self.plan.hardware, devices_per_node=2, device_link_bytes_per_second=100.0)
        dump = dump_plan(replace(self.plan, num_ranks=2, hardware=hardware))
        header, _, rest = dump.partition("\n\n")
        transfers = next(section for section in rest.split("\n\n") if section.startswith("transfers"))
        self.assertExpectedInline(
            f"{header}\n\n{transfers}",
            """\
plan v10  small  training
  compute in each parameter's own dtype; 12 ticks: 6 forward, 6 backward; rates of paper
  of one of 2 ranks on 1 node, which keeps its shard of what is not resident, and gathers
  the full value over the device links

transfers  4 of 800 B in all, at most 400 B ahead of compute
  issue -> need by -> release  route           name      shard   full  arena, bytes
      0 ->       1 ->       3  nvme -> device  layers.0  100 B  200 B  [  0, 200)
      1 ->       3 ->       5  nvme -> device  layers.1  100 B  200 B  [256, 456)
      6 ->       7 ->       9  nvme -> device  layers.1  100 B  200 B  [256, 456)
      7 ->       9 ->      11  nvme -> device  layers.0  100 B  200 B  [  0, 200)""",
        )

    def test_replicas(self) -> None:
        links = {"device_link_bytes_per_second": 100.0, "node_link_bytes_per_second": 100.0}
        hardware = replace(self.plan.hardware, devices_per_node=2, **links)
        plan = replace(self.plan, num_ranks=2, num_replicas=2, hardware=hardware.with_world(2, 2))
        self.assertExpectedInline(
            dump_plan(plan).partition("\n\n")[0],
            """\
plan v10  small  training
  compute in each parameter's own dtype; 12 ticks: 6 forward, 6 backward; rates of paper
  of one of 4 ranks on 2 nodes, in 2 replicas of 2 ranks each
  it keeps its shard of what is not resident, and gathers the full value over the device links
  gradients are added up between replicas over the node links, in the order of ranks""",
        )
        alone = replace(plan, num_ranks=1, num_replicas=2, hardware=hardware, is_reduced_in_order=False)
        self.assertExpectedInline(
            dump_plan(alone).partition("\n\n")[0],
            """\
plan v10  small  training
  compute in each parameter's own dtype; 12 ticks: 6 forward, 6 backward; rates of paper
  of one of 2 ranks on 1 node, in 2 replicas of 1 rank each
  it keeps everything
  gradients are added up between replicas over the device links, in any order""",
        )
        self.assertExpectedInline(
            dump_plan_difference(plan, alone),
            """\
num ranks: 2 -> 1
is reduced in order: yes -> no
hardware num nodes: 2 -> 1
predicted forward: 8.40 s -> 7.00 s (-16.7%)
predicted backward: 16.0 s -> 14.0 s (-12.5%)
predicted stalls: 40.4 s -> 37.0 s (-8.4%)
predicted total: 64.4 s -> 61.0 s (-5.3%)""",
        )

    def test_what_differs(self) -> None:
        moved = tuple(
            item.moved({Role.COMPUTE: Tier.HOST, Role.MASTER: Tier.HOST})
            if item.parameter == "layers.1.weight"
            else item
            for item in self.plan.placements
        )
        other = replace(
            self.plan,
            placements=moved,
            transfers=tuple(
                replace(item, source=Tier.HOST) if item.name == "layers.1" else item for item in self.plan.transfers
            ),
            activations=replace(self.plan.activations, policy=ActivationPolicy.RECOMPUTE_BLOCKS, saved_nbytes=20),
            hardware=replace(
                self.plan.hardware,
                routes=(*self.plan.hardware.routes[:-1], make_route(Tier.NVME, Tier.HOST, 400.0)),
            ),
        )
        self.assertExpectedInline(
            dump_plan_difference(self.plan, other),
            """\
hardware route nvme -> host: 100/s -> 400/s
layers.1.weight: compute nvme -> host, master nvme -> host
activations policy: save -> recompute_blocks
activations saved: 120 B -> 20 B
transfers: 4 of 800 B -> 4 of 800 B; 2 are the same
predicted backward: 12.0 s -> 11.0 s (-8.3%)
predicted step: 40.0 s -> 28.0 s (-30.0%)
predicted stalls: 35.0 s -> 22.0 s (-37.1%)
predicted total: 59.0 s -> 46.0 s (-22.0%)""",
        )


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_asked(make_plan: Callable[..., Plan], small_plan: Plan, width: int) -> None:
    for plan in (small_plan, make_plan(24), make_plan(100, num_slots=50)):
        assert max(len(line) for line in dump_plan(plan, width=width).splitlines()) <= width


def test_alike_layers_are_folded(layered_plan: Plan) -> None:
    text = dump_plan(layered_plan)
    assert "layers.{0..23}.norm.weight     24  768.0 KiB  device   host    host      host" in text
    assert "      ... 14 more alike, 1.31 GiB: layers.{9..22}\n" in text
    assert len(text.splitlines()) < 90


def test_a_dump_does_not_grow_with_the_number_of_layers(make_plan: Callable[..., Plan]) -> None:
    assert len(dump_plan(make_plan(100)).splitlines()) <= len(dump_plan(make_plan(24)).splitlines())


def test_layers_with_several_transfers_each_are_folded_by_the_layer(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(24)
    split = tuple(
        half
        for item in plan.gathers
        for half in (
            replace(item, name=f"{item.name}.attn", nbytes=item.nbytes // 4),
            replace(
                item,
                name=f"{item.name}.mlp",
                offsets=tuple(offset + item.nbytes // 4 for offset in item.offsets),
                nbytes=item.nbytes * 3 // 4,
            ),
        )
    )
    assert "more alike, 1.41 GiB: layers.{8..22}.attn, layers.{8..22}.mlp" in dump_plan(
        with_transfers(plan, gathers=split)
    )


def test_transfers_that_are_not_alike_are_cut_in_the_middle(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(50)
    unlike = tuple(replace(item, nbytes=item.nbytes - index) for index, item in enumerate(plan.gathers))
    assert "      ... 40 more alike" in dump_plan(with_transfers(plan, gathers=unlike))


def test_parameters_of_one_block_share_a_line_only_with_equal_homes(layered_plan: Plan) -> None:
    changed = tuple(
        item.moved({Role.GRADIENT: Tier.HOST}) if item.parameter == "layers.9.mlp.up.weight" else item
        for item in layered_plan.placements
    )
    text = dump_plan(replace(layered_plan, placements=changed))
    assert "  layers.{6..8,10..23}.mlp.up.weight" in text
    assert "  layers.9.mlp.up.weight" in text
    assert "    attn.qkv.weight, attn.out.weight, mlp.down.weight\n" in text


def test_every_parameter_is_counted_once(layered_plan: Plan) -> None:
    section = dump_plan(layered_plan).split("\n\n")[2].splitlines()[1:]
    counts = [int(line.split()[1]) for line in section if not line.startswith("    ")]
    assert sum(counts) == len(layered_plan.placements)


def test_unread_parameters_are_named(small_plan: Plan) -> None:
    assert "  1 not read by this graph: layers.1.bias\n" in dump_plan(
        replace(small_plan, uses=tuple(use for use in small_plan.uses if use.parameter != "layers.1.bias"))
    )


def test_notes_are_told_within_the_width(small_plan: Plan) -> None:
    plan = replace(small_plan, notes=("head.weight is read twice, " * 6 + "once",))
    lines = dump_plan(plan, width=60).splitlines()
    assert " ".join(" ".join(lines).split()).count("head.weight is read twice,") == 6
    assert max(map(len, lines)) <= 60


def test_a_plan_without_transfers(small_plan: Plan) -> None:
    plan = replace(
        small_plan,
        schedule=Schedule.of_one_graph(6, 6),
        spans=tuple(span for span in small_plan.spans if span.phase is Phase.FORWARD),
        transfers=(),
        bound=small_plan.bound[:3],
    )
    text = dump_plan(plan)
    assert "                     ......\n  device [456, 512)  .#####  3 bound values\n" in text
    text = dump_plan(replace(plan, bound=()))
    assert "plan v10  small  inference\n" in text
    assert "transfers  none: every parameter this graph reads is resident" in text
    assert "\narena  " not in text
    assert "bound  " not in text
    assert "gradients" not in text
    assert text == text.rstrip()


def test_activations_that_leave_the_device(small_plan: Plan, swapping_plan: Plan) -> None:
    text = dump_plan(swapping_plan)
    assert (
        """
swaps  1, away from the device between forward and backward: 24 B on host
  out -> gone    issue -> need by -> release  rests on  name      bytes
      2 ->    5      9 ->      10 ->      11  host      gelu_1     24 B
"""
        in text
    )
    assert "  device [456, 512)  .#####.####.  5 bound values, 1 swapped\n" in text
    assert "bound        5 of compute's values, and 1 swapped, in 56 B of the arena\n" in text
    difference = dump_plan_difference(small_plan, swapping_plan)
    assert "activations that leave the device: 0 of 0 B -> 1 of 24 B" in difference.splitlines()


def test_str_of_a_view_is_the_dump_of_its_plan(small_plan: Plan) -> None:
    assert str(PlanView(small_plan)) == dump_plan(small_plan)


def test_equal_plans(small_plan: Plan) -> None:
    assert dump_plan_difference(small_plan, replace(small_plan)) == "the plans are equal"


def test_every_difference_is_said(small_plan: Plan) -> None:
    others = {
        "placements: in another order": replace(small_plan, placements=small_plan.placements[::-1]),
        "uses: 5 -> 4 records": replace(small_plan, uses=small_plan.uses[1:]),
        "spans: 8 -> 8 records": replace(
            small_plan, spans=(replace(small_plan.spans[0], module="wte"), *small_plan.spans[1:])
        ),
        "transfers: 4 of 800 B -> 4 of 800 B; 3 are the same": with_transfers(
            small_plan, gathers=(replace(small_plan.gathers[0], offsets=(8,)), *small_plan.gathers[1:])
        ),
        "bound values: 5 in 56 B -> 4 in 56 B; 4 are the same": replace(small_plan, bound=small_plan.bound[1:]),
        "bound values: 5 in 56 B -> 0 in 0 B": replace(small_plan, bound=()),
        "bound values: 5 in 56 B -> 5 in 56 B; 5 are the same, 88 B further on": replace(
            small_plan,
            arena_nbytes=600,
            bound=tuple(replace(value, offset=value.offset + 88) for value in small_plan.bound),
        ),
        "the plans list the same records in another order": replace(small_plan, tiers=small_plan.tiers[::-1]),
        "step chunk elements: 25 -> 50": replace(small_plan, step=replace(small_plan.step, chunk_elements=50)),
        "embed.weight: only in the first plan": replace(small_plan, placements=small_plan.placements[1:]),
        "device capacity: 1000 B -> none": replace(
            small_plan, tiers=(replace(small_plan.tiers[0], capacity=None), *small_plan.tiers[1:])
        ),
    }
    for text, other in others.items():
        assert text in dump_plan_difference(small_plan, other)


def test_rounding_hides_no_difference(small_plan: Plan) -> None:
    large, larger = (
        replace(small_plan, tiers=(*small_plan.tiers[:2], replace(small_plan.tiers[2], predicted_peak=2**31 + more)))
        for more in (0, 1)
    )
    assert dump_plan_difference(large, larger) == "nvme predicted peak: 2147483648 -> 2147483649"


def test_folded_differences_name_the_layers(layered_plan: Plan) -> None:
    changed = tuple(
        item.moved({Role.COMPUTE: Tier.DEVICE})
        if item.parameter in ("layers.7.mlp.up.weight", "layers.8.mlp.up.weight")
        else item
        for item in layered_plan.placements
    )
    text = dump_plan_difference(layered_plan, replace(layered_plan, placements=changed))
    assert text == "layers.{7,8}.mlp.up.weight: compute nvme -> device"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (12.3456, "12.3 s"), (1.0, "1.00 s"), (250.4, "250 s"), (0.0999, "99.9 ms"), (3.2e-6, "3.20 us")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_copies_narrower_than_the_model_computes_with_are_named(small_plan: Plan) -> None:
    placements = tuple(
        narrow(item) if item.parameter.startswith("layers") and item.parameter.endswith("weight") else item
        for item in small_plan.placements
    )
    uses = tuple(
        replace(use, dtype="bfloat16") if use.parameter == "layers.0.weight" else use for use in small_plan.uses
    )
    lines = dump_plan(replace(small_plan, placements=placements, uses=uses)).splitlines()
    assert "  moved in bfloat16, by their compute copies: layers.0.weight" in lines
    assert "  moved in float32, by their master copies: layers.1.weight" in lines
    assert not any("moved in" in line for line in dump_plan(small_plan).splitlines())
