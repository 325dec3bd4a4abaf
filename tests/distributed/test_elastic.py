"""Elastic torchrun: ranks are killed, and groups of other sizes go on to the bit as if they had been resumed by hand."""

import importlib.util
import itertools
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.elastic_agents import ROOT, ElasticAgents, Group
from tests.support.rank_pool import RankPool
from zinf_compile.checkpoint.checkpoint_folder import MODEL, OBJECTS, OPTIMIZER, read_manifest
from zinf_compile.checkpoint.objects import load_objects

EXAMPLE = ROOT / "examples" / "elastic.py"
SAVE_EVERY, ENDLESS = 2, 1_000_000
TIMEOUT_SECONDS = 90  # after which ranks that start miss a machine that is gone
PoolOf = Callable[[int], RankPool]


def train_example(steps: int, checkpoint: Path, nvme: str) -> None:
    """Train the example on each rank of a pool."""
    spec = importlib.util.spec_from_file_location("elastic", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.train(steps, SAVE_EVERY, checkpoint, nvme)


def script(steps: int) -> list[str]:
    return [str(EXAMPLE), "--steps", str(steps), "--save-every", str(SAVE_EVERY), "--timeout", str(TIMEOUT_SECONDS)]


def contents_of(checkpoint: Path) -> tuple[int, dict[str, bytes]]:
    """Return the step of a checkpoint, and the bytes of each file of tensors."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    data = checkpoint / manifest.data_folder
    step, _ = load_objects((data / OBJECTS).read_bytes(), data / OBJECTS).extra
    return step, {name: (data / name).read_bytes() for name in (MODEL, OPTIMIZER)}


def assert_resumed_by_hand(groups: Sequence[Group], folder: Path, pool_of: PoolOf) -> None:
    """Train again, in other processes: each group from the save it began with to the save that the next one began with."""
    by_hand = folder / "by hand"
    last_step, found = contents_of(folder / "checkpoint")
    for group, end in zip(groups, [*(following.step for following in groups[1:]), last_step], strict=True):
        if end > group.step:
            pool_of(group.num_ranks).run(train_example, end, by_hand, str(folder))
    assert contents_of(by_hand) == (last_step, found), groups


@pytest.mark.slow
@pytest.mark.long
def test_ranks_of_one_machine_are_restarted(tmp_path: Path, pool_of: PoolOf) -> None:
    with ElasticAgents(tmp_path, script(12), most=1, ranks_each=2) as agents:
        agent = agents.start()
        agents.wait_for_group(2, num_steps=5)
        assert agents.kill_rank(agent, 1)
        agents.finish([agent])
    first, second = agents.groups()
    assert (first, second.num_ranks) == (Group(0, 2), 2)
    assert second.step > 0
    assert contents_of(tmp_path / "checkpoint")[0] == 12
    assert_resumed_by_hand([first, second], tmp_path, pool_of)


@pytest.mark.slow
@pytest.mark.long
def test_a_machine_is_lost_and_another_one_comes(tmp_path: Path, pool_of: PoolOf) -> None:
    """The first of three machines, with rank 0, is lost in a save; two go on, until there is a third one again."""
    with ElasticAgents(tmp_path, script(ENDLESS), most=3) as agents:
        first, *_ = [agents.start() for _ in range(3)]
        agents.wait_for_group(3, num_steps=3)
        agents.wait_until(lambda: is_saving(tmp_path), "a save begins")
        agents.kill_agent(first)
        agents.wait_for_group(2, num_steps=3)
        agents.start()
        agents.wait_for_group(3, num_steps=3)
    assert [size for size, _ in itertools.groupby(group.num_ranks for group in agents.groups())][-3:] == [3, 2, 3]
    assert_resumed_by_hand(agents.groups(), tmp_path, pool_of)


def is_saving(folder: Path) -> bool:
    """Return whether a save has begun, and has not ended."""
    return (folder / "checkpoint" / ".zinf-saving.json").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_kills(seed: int, tmp_path: Path, pool_of: PoolOf) -> None:
    """A rank or a machine dies, or is wanted back, three times: in a step, in a save, or while ranks start. Then all die."""
    draw, num_groups = random.Random(seed), 0
    with ElasticAgents(tmp_path, script(ENDLESS), most=3) as agents:
        machines = [agents.start() for _ in range(3)]
        for _ in range(3):
            victim = draw.choice(machines)
            when = draw.choice(["in a step", "in a save", "while it starts"])
            if when == "while it starts":
                agents.wait_until(partial(agents.ranks_of, victim), "there is a rank")
                time.sleep(draw.uniform(0.0, 5.0))
            else:
                agents.wait_for_group(len(machines), after=num_groups, num_steps=draw.randrange(10))
                if when == "in a save":
                    agents.wait_until(lambda: is_saving(tmp_path), "a save begins")
                time.sleep(draw.uniform(0.0, 0.3 if when == "in a step" else 0.02))
            num_groups = len(agents.groups())
            if len(machines) > 1 and draw.random() < 0.6:
                draw.choice([agents.kill_agent, agents.drain_agent])(victim)
                machines.remove(victim)
            else:
                agents.wait_until(partial(agents.kill_rank, victim), "a rank is killed")
            if len(machines) < 3 and draw.random() < 0.5:
                machines.append(agents.start())
            print(f"killed {victim} {when}; {len(machines)} machines", flush=True)
        agents.wait_for_group(len(machines), after=num_groups, num_steps=3)
    assert_resumed_by_hand(agents.groups(), tmp_path, pool_of)
