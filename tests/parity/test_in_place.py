"""Frozen weights in place: read from the safetensors files that they are in, bitwise as in plain PyTorch, not copied."""

import gc
import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zinf_compile
from zinf_compile.ir.copies import Role
from zinf_compile.ir.errors import CapacityError, CheckpointError, StoreError
from zinf_compile.ir.glossary import Tier, format_bytes
from zinf_compile.runtime.params.records import record_of
from zinf_compile.runtime.storage.nvme import posix, weight_file
from zinf_compile.runtime.storage.safetensors_file import lay_out
from zinf_compile.runtime.store.store import Store

WIDTH = 264  # 139,392 bytes of bfloat16 a layer: no multiple of a sector
STEPS = 3
BUDGETS = {"device_memory": "1MiB", "host_memory": "1MiB", "reserve_memory": 0}


class Layer(nn.Module):
    """A frozen linear layer and norm with a trained adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH, dtype=dtype).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(6))
        self.head = nn.Linear(WIDTH, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.flatten())


_opened: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close every model at the end of a test."""
    yield
    while _opened:
        zinf_compile.close(_opened.pop())


def build(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


def write_weights(folder: Path, tensors: dict[str, Tensor], *, shift: int = 0, num_files: int = 1) -> Path:
    """Write safetensors whose tensors begin ``shift`` bytes behind a sector; in several files, with an index."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    files = {}
    for number in range(num_files):
        file = "model.safetensors" if num_files == 1 else f"part{number}.safetensors"
        chosen = {name: tensors[name] for name in names[number::num_files]}
        layout = lay_out(chosen, metadata={"format": "pt"})
        length = len(layout.header) - 8 + shift
        header = length.to_bytes(8, "little") + layout.header[8:] + b" " * shift
        values = [chosen[span.name].detach().contiguous().view(-1).view(torch.uint8) for span in layout.spans]
        (folder / file).write_bytes(header + b"".join(bytes(value.numpy()) for value in values))
        files.update(dict.fromkeys(chosen, file))
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def optimized(source: Path, dtype: torch.dtype = torch.float32, **options) -> Net:
    with torch.device("meta"):
        model = build(dtype)
    options = {"nvme": str(source.parent), "compute": "aten", "capture": False, **BUDGETS, **options}
    _opened.append(zinf_compile.optimize(model, init=source, **options))
    return model


def store_of(model: nn.Module) -> Store:
    record = record_of(next(model.parameters()))
    assert record is not None
    assert isinstance(record.store, Store)
    return record.store


def names_in_place(model: nn.Module) -> set[str]:
    return {name for name, record in store_of(model).records.items() if record.copies.in_place is not None}


def disk_nbytes(model: nn.Module) -> int:
    engine = store_of(model).engine
    assert isinstance(engine, posix.PosixEngine)
    return os.stat(engine.path).st_blocks * 512


def batches(num_steps: int = STEPS) -> list[Tensor]:
    return list(torch.randint(40, (num_steps, 2, 9), generator=torch.Generator().manual_seed(1)))


class Loop:
    """The same steps of a plain and an optimized model, whose values are compared after each."""

    def __init__(self, plain: nn.Module, model: nn.Module) -> None:
        self.models = plain, model
        self.optimizers = [
            torch.optim.AdamW([parameter for parameter in each.parameters() if parameter.requires_grad], lr=1e-2)
            for each in self.models
        ]

    def step(self, tokens: Tensor) -> None:
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            losses.append(model(tokens))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
        self.check()

    def check(self) -> None:
        plain, model = self.models
        for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(expected, found), name


@pytest.mark.parametrize(
    ("dtype", "shift", "num_files", "options"),
    [
        pytest.param(torch.float32, 0, 1, {"capture": True}, marks=pytest.mark.long),
        (torch.bfloat16, 1064, 1, {"capture": True}),
        (torch.bfloat16, 8, 3, {}),
        (torch.float32, 4092, 2, {}),
        (torch.float32, 2, 1, {}),  # no multiple of an element: copied as before
        (torch.float32, 8, 1, {"verify_store": True}),
        (torch.float32, 8, 1, {"through": "page cache"}),
    ],
)
def test_training_is_bitwise_that_of_plain_pytorch(tmp_path, monkeypatch, dtype, shift, num_files, options):
    if options.get("verify_store"):
        pytest.importorskip("xxhash")
    if options.pop("through", None):
        monkeypatch.setattr(weight_file, "_reopen_direct", lambda descriptor, path: None)
    plain = build(dtype)
    source = write_weights(tmp_path / "weights", plain.state_dict(), shift=shift, num_files=num_files)
    if dtype is torch.bfloat16:
        options |= {"device_memory": "512KiB", "host_memory": "512KiB"}
    before = {file: file.read_bytes() for file in source.iterdir()}
    model = optimized(source, dtype, **options)
    loop = Loop(plain, model)
    for tokens in batches():
        loop.step(tokens)
    store = store_of(model)
    in_place = names_in_place(model)
    if shift % dtype.itemsize:
        assert not in_place
    else:
        assert len(in_place) >= 4
        on_nvme = [record for record in store.records.values() if record.copies.compute.tier is Tier.NVME]
        frozen = {record.name for record in on_nvme if not record.parameter.requires_grad}
        assert in_place == frozen
        assert {"nvme -> device", "nvme -> host"} & dict(store.meter.moved).keys()
        report = zinf_compile.report(model)
        nbytes = sum(store.records[name].copies.compute.nbytes for name in in_place)
        assert report.in_place_nbytes == nbytes
        assert f"weights: {format_bytes(nbytes)} of frozen parameters" in str(report)
        assert all(each.plan.in_place_nbytes == nbytes for each in report.plans)
    store.check_integrity()
    store.close()
    assert {file: file.read_bytes() for file in source.iterdir()} == before


@pytest.fixture
def plain() -> Net:
    return build()


@pytest.fixture
def source(plain: Net, tmp_path: Path) -> Path:
    return write_weights(tmp_path / "weights", plain.state_dict(), shift=8)


def test_loading_reads_nothing_of_what_stays_and_takes_no_disk(plain, source, monkeypatch):
    read = []
    preadv = os.preadv

    def counted(descriptor: int, pieces, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            read.append(sum(len(piece) for piece in pieces))
        return preadv(descriptor, pieces, offset)

    monkeypatch.setattr(os, "preadv", counted)
    model = optimized(source)
    in_place = names_in_place(model)
    copied = sum(each.nbytes for name, each in model.named_parameters() if name not in in_place)
    assert "layers.0.base.weight" in in_place or "layers.5.base.weight" in in_place
    assert sum(read) <= copied + 2 * 4096  # and two probes for O_DIRECT
    loop = Loop(plain, model)
    for tokens in batches():
        loop.step(tokens)
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    assert disk_nbytes(model) <= 4 * trained + 2**16  # values, gradients, state; nothing of the base


def add_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(0.5)


def fill(parameter: nn.Parameter) -> None:
    nn.init.constant_(parameter, 0.25)


def copy(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.copy_(torch.ones_like(parameter))


def copy_a_row(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[3] = 7.0


def add_to_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(2.0)


def set_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.full(parameter.shape, 0.125)


def add_by_numpy(parameter: nn.Parameter) -> None:
    parameter.detach().numpy()[1] += 1.0


def foreach(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([parameter], 0.5)


@pytest.mark.parametrize("write", [add_in_place, fill, copy, copy_a_row, add_to_data, set_data, add_by_numpy, foreach])
@pytest.mark.parametrize("is_first", [True, False], ids=["before the first step", "between steps"])
def test_a_parameter_that_is_written_moves_to_the_store(plain, source, write, is_first):
    before = (source / "model.safetensors").read_bytes()
    model = optimized(source)
    loop, tokens = Loop(plain, model), batches()
    if not is_first:
        loop.step(tokens[0])
    name = sorted(name for name in names_in_place(model) if name.endswith("base.weight"))[-1]
    for each in loop.models:
        write(each.get_parameter(name))
    loop.step(tokens[1])
    loop.step(tokens[2])
    assert name not in names_in_place(model)
    assert store_of(model).records[name].copies.compute.tier is Tier.NVME
    assert names_in_place(model)
    store_of(model).check_integrity()
    assert (source / "model.safetensors").read_bytes() == before


def test_an_alias_that_is_kept_is_followed(plain, source):
    model = optimized(source)
    loop = Loop(plain, model)
    name = "layers.5.base.weight"
    assert name in names_in_place(model)
    kept = [each.get_parameter(name).data for each in loop.models]
    for tokens in batches():
        for alias in kept:
            alias.add_(0.125)
        loop.step(tokens)
    del kept
    loop.step(batches()[0])
    store_of(model).check_integrity()


def test_what_stays_in_memory_because_of_an_alias_has_to_fit_there(plain, source):
    model = optimized(source, capture=True)
    loop = Loop(plain, model)
    loop.step(batches()[0])
    names = sorted(names_in_place(model) - {"embed.weight"})
    kept = [[each.get_parameter(name).data for name in names] for each in loop.models]
    for alias in (*kept[0], *kept[1]):
        alias.add_(0.125)
    with pytest.raises(
        CapacityError, match=r"was written to through a tensor that somebody holds.* host_memory is 1\.0 MiB"
    ):
        model(batches()[1])
    del kept, alias  # then what was written goes to the disk
    for tokens in batches():
        loop.step(tokens)
    store_of(model).check_integrity()


def test_a_look_moves_nothing(plain, source):
    model = optimized(source)
    in_place = names_in_place(model)
    states = model.state_dict()
    model(batches()[0])
    total = sum(float(each.double().sum()) for each in states.values())
    with zinf_compile.full_parameters(model.layers[5]):
        model.layers[5].base.weight.sum()
    zinf_compile.export(model, source.parent / "exported")
    model(batches()[0])
    assert total == sum(float(each.double().sum()) for each in plain.state_dict().values())
    assert names_in_place(model) == in_place


def test_what_is_written_inside_full_parameters_counts(plain, source):
    model = optimized(source)
    with zinf_compile.full_parameters(model.layers[5]), torch.no_grad():
        model.layers[5].base.weight.mul_(3.0)
    with torch.no_grad():
        plain.layers[5].base.weight.mul_(3.0)
    Loop(plain, model).step(batches()[0])
    assert "layers.5.base.weight" not in names_in_place(model)


def test_a_write_counts_at_once(plain, source, tmp_path):
    model = optimized(source)
    for each in (plain, model):
        each.get_parameter("layers.5.base.weight").data.add_(1.0)
    zinf_compile.export(model, tmp_path / "exported")
    zinf_compile.save(tmp_path / "checkpoint", model)
    for again in (optimized(tmp_path / "exported"), optimized(source)):
        if again is not None and not torch.equal(again.layers[5].base.weight, plain.layers[5].base.weight):
            zinf_compile.load(tmp_path / "checkpoint", again)
        Loop(plain, again).check()


@pytest.mark.parametrize("is_written", [False, True])
def test_what_a_plan_moves_to_memory_and_back_is_in_place_again_unless_it_was_written(plain, source, is_written):
    model = optimized(source)
    store, name = store_of(model), "layers.5.base.weight"
    catalog = store.session.catalog
    for tier in (Tier.HOST, Tier.NVME):
        moved = (
            each.moved({Role.COMPUTE: tier}) if each.parameter == name else each for each in store.placements.values()
        )
        catalog.placements = tuple(moved)
        catalog.settle()
        assert store.records[name].copies.compute.tier is tier
        if tier is Tier.HOST and is_written:
            for each in (plain, model):
                each.get_parameter(name).data.mul_(2.0)
    assert (name in names_in_place(model)) is not is_written
    assert (store.placements[name].in_place_nbytes == 0) is is_written
    Loop(plain, model).step(batches()[0])
    catalog.settle()
    store.check_integrity()


def test_an_unfrozen_parameter_is_trained(plain, source):
    model = optimized(source)
    loop = Loop(plain, model)
    loop.step(batches()[0])
    for each in loop.models:
        each.layers[5].base.requires_grad_(True)
    loop = Loop(plain, model)
    for tokens in batches():
        loop.step(tokens)
    assert "layers.5.base.weight" not in names_in_place(model)
    store_of(model).check_integrity()


def test_loaded_values_replace_those_in_place(plain, source, tmp_path):
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    model = optimized(source)
    model.load_state_dict(other.state_dict())
    Loop(other, model).step(batches()[0])
    zinf_compile.save(tmp_path / "checkpoint", model)
    again = optimized(source)
    zinf_compile.load(tmp_path / "checkpoint", again)
    Loop(other, again).step(batches()[1])
    store_of(again).check_integrity()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def rewrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(8000)
        opened.write(b"another")


@pytest.mark.parametrize("change", [cut, rewrite, os.utime])
@pytest.mark.parametrize("use", ["step", "look"])
def test_a_changed_file_is_named(plain, source, change: Callable[[Path], None], use: str):
    model = optimized(source)
    loop = Loop(plain, model)
    loop.step(batches()[0])
    change(source / "model.safetensors")
    with pytest.raises(StoreError, match=r"weights/model.safetensors has changed since optimize\(\) opened it"):
        model(batches()[1]) if use == "step" else model.layers[5].base.weight.sum()


def test_after_a_change_a_checkpoint_can_be_loaded(plain, source, tmp_path):
    model = optimized(source)
    loop = Loop(plain, model)
    zinf_compile.save(tmp_path / "checkpoint", model, loop.optimizers[1])
    cut(source / "model.safetensors")
    with pytest.raises(StoreError, match="has changed"):
        model(batches()[0])
    with pytest.raises(StoreError, match="an earlier error stopped this model"):
        model(batches()[0])
    zinf_compile.load(tmp_path / "checkpoint", model, loop.optimizers[1])
    loop.step(batches()[0])
    assert not names_in_place(model)


def test_a_file_that_is_replaced_or_removed_stays_open(plain, source):
    model = optimized(source)
    write_weights(source.parent / "others", {name: each + 1 for name, each in plain.state_dict().items()})
    (source.parent / "others" / "model.safetensors").rename(source / "model.safetensors")
    loop = Loop(plain, model)
    loop.step(batches()[0])
    (source / "model.safetensors").unlink()
    loop.step(batches()[1])


def test_a_header_that_lies_is_an_error_at_once(source):
    cut(source / "model.safetensors")
    with pytest.raises(CheckpointError, match="is damaged: it should have"):
        optimized(source)


def test_files_are_closed_with_the_model_and_after_errors(plain, source, monkeypatch):
    def opened() -> int:
        gc.collect()
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(os.path.lexists(link) and os.readlink(link).endswith(".safetensors") for link in links)

    model = optimized(source)
    assert opened() == 2
    store = store_of(model)
    weight = model.layers[5].base.weight
    store.close()
    assert opened() == 0
    assert torch.equal(weight, plain.layers[5].base.weight)  # a mapping needs no descriptor
    with pytest.raises(CapacityError):
        optimized(source, device_memory="16KiB")
    assert opened() == 0


def test_a_model_that_is_dropped_closes_its_files(source):
    model = optimized(source)
    _opened.clear()
    gone = weakref.ref(store_of(model))
    del model
    gc.collect()
    assert gone() is None


def test_what_stays_is_not_counted_in_the_budget_of_the_disk(plain, source):
    with pytest.raises(CapacityError, match="nvme_memory"):
        optimized(write_weights(source.parent / "copied", plain.state_dict(), shift=2), nvme_memory="16KiB")
    model = optimized(source, nvme_memory="16KiB")
    name = sorted(names_in_place(model))[-1]
    with pytest.raises(CapacityError, match="raise nvme_memory to"), torch.no_grad():
        model.get_parameter("layers.5.base.weight").copy_(torch.zeros(WIDTH, WIDTH))
    Loop(plain, model).step(batches()[0])
    assert name in names_in_place(model)


@pytest.mark.of_a_cpu(reason="a child of a process that uses a GPU cannot use it")
def test_a_forked_child_sees_and_writes_its_own(plain, source):
    model = optimized(source)
    weight, name = model.layers[5].base.weight, "layers.5.base.weight"
    assert name in names_in_place(model)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert torch.equal(weight.detach(), plain.layers[5].base.weight)
            with torch.no_grad():
                weight.add_(1.0)
            assert torch.equal(weight.detach(), plain.layers[5].base.weight + 1.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    Loop(plain, model).step(batches()[0])
    assert name in names_in_place(model)
