"""``torch.compile(model, backend="zinf")`` on models that were never passed to ``optimize``, compared with ``aot_eager``."""

import pytest
import torch
from torch import nn

from tests.support.small_models import gpt, gpt_tied, mlp, token_batches
from zinf_compile.runtime.params.coded_state import CodedHomeTensor

pytestmark = pytest.mark.of_a_cpu(reason="a backend of torch.compile takes no other device")


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    batches = [{"input_ids": batch["tokens"], "labels": batch["tokens"]} for batch in token_batches(64)]
    return transformers.LlamaForCausalLM(config), batches


def test_what_was_frozen_is_trained_once_it_requires_grad(parity, tmp_path):
    def train(backend, **options):
        (model, batches), trace = mlp(), parity.trace()
        model.up.requires_grad_(False)
        compiled = torch.compile(model, backend=backend, dynamic=False, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step, batch in enumerate(batches):
            model.up.requires_grad_(step > 1)
            loss = compiled(**batch)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.take_step(model, optimizer)
        torch._dynamo.reset()
        return trace

    options = {"device_memory": 156 * 2**10, "host_memory": 2**20, "nvme": tmp_path}
    parity.assert_same(train("zinf", options=options), train("aot_eager"))


class Broken(nn.Module):
    """Two graphs, each with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def test_options_name_parameters_of_a_later_graph(tmp_path):
    """When the first graph is compiled the others are not known."""
    model = Broken()
    options = {"device_memory": "8MiB", "host_memory": "8MiB", "nvme": tmp_path, "compute": "aten", "reserve_memory": 0}
    options |= {"state_dtype": "int8", "exact_state": "*second.weight", "tiles": {"second.weight": 2}}
    compiled = torch.compile(model, backend="zinf", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(torch.ones(4, 128)).backward()
    optimizer.step()
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    assert {name for name, moment in moments.items() if isinstance(moment, CodedHomeTensor)} == {"first.weight"}
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("workload", "placement"),
    [
        *((mlp, "nvme"), (mlp, "host"), (gpt_tied, "nvme")),
        *(pytest.param(each, "nvme", marks=pytest.mark.long) for each in (gpt, llama)),
    ],
)
def test_bitwise(parity, workload, placement):
    plain = parity.plain_runs(workload)
    options = parity.budgets(workload, placement, captured=True, backend="zinf")
    model, batches = workload()
    before = {name: (type(p), p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    compiled = torch.compile(model, backend="zinf", options=options, dynamic=False)
    report = parity.check_compiled(compiled, model, batches, plain)
    parity.assert_streamed(report, placement, captured=True)
    after = {name: (type(p), p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}
    assert after == before
    assert {kind for kind, *_ in after.values()} == {nn.Parameter}
    if workload is gpt_tied:
        assert model.embed.weight is model.head.weight
