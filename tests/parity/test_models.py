"""Small models in every placement and mode: five AdamW steps are bitwise equal to plain PyTorch."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.small_models import STEPS, conv_net, early_views, gpt, gpt_tied, mlp, used_twice


@pytest.mark.parametrize("workload", [gpt, gpt_tied, mlp, conv_net, used_twice, early_views])
def test_bitwise(parity, workload, placement, way):
    parity.check(workload, placement, **way)


def loss_with_l2(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Read every parameter outside of the forward, as a hand-written weight decay does."""
    return model(**batch) + 1e-3 * sum(parameter.pow(2).sum() for parameter in model.parameters())


def loss_with_head(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Read one parameter through its module, outside of the forward."""
    return model(**batch) + 1e-2 * model.down.weight.abs().mean()


@pytest.mark.parametrize("loss", [loss_with_l2, loss_with_head])
def test_parameter_used_outside_of_forward(parity, placement, way, loss):
    if parity.has_gpu:
        pytest.skip("outside of the forward a parameter is where its home is, on a CPU, where a mean rounds otherwise")
    parity.check(mlp, placement, **way, loss=loss)


def test_batch_norm_buffers_move(parity):
    """Buffers change during training, so that comparing them tests something."""
    first, *_, last = parity.reference(conv_net, captured=False).buffers
    assert not torch.equal(first["features.1.running_mean"], last["features.1.running_mean"])


def test_step_is_cut_into_chunks(parity):
    """The MLP's widest parameters take several chunks, the last of them short."""
    (plan,) = parity.check(mlp, "nvme", captured=True).plans
    sizes = [p.compute_nbytes // 4 for p in plan.placements]
    assert any(size > plan.step.chunk_elements and size % plan.step.chunk_elements for size in sizes)


@pytest.mark.parametrize("kind", ["losses", "gradients", "parameters", "buffers", "states"])
def test_comparison_notices_the_last_bit(parity, kind):
    """Flip one bit of one element of any kind in the last step: the comparison fails and says where."""
    workload = conv_net
    plain = parity.reference(workload, captured=False)
    model, batches = parity.make(workload, plain=True)
    ours = parity.train(model, batches)
    parity.assert_same(ours, plain)
    last = getattr(ours, kind)[-1]
    name, changed = (
        ("loss", last) if kind == "losses" else next((n, t) for n, t in last.items() if t.is_floating_point())
    )
    changed.view(-1)[-1:] = torch.nextafter(changed.view(-1)[-1:], changed.new_tensor(torch.inf))
    with pytest.raises(AssertionError, match=f"record {STEPS - 1}: .*{name}.*differ"):
        parity.assert_same(ours, plain)


def test_training_notices_one_changed_weight(parity, captured):
    """A weight that differs by one bit before the third step, with parameters on nvme, changes everything after it."""
    model, batches = parity.optimized(mlp, "nvme", captured=captured)
    seen = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch)
        if len(seen) == 3:
            with torch.no_grad():
                model.down.bias[0] = torch.nextafter(model.down.bias[0], torch.tensor(torch.inf))
        return model(**batch)

    ours = parity.train(model, batches, loss=loss)
    with pytest.raises(AssertionError, match="record 2"):
        parity.assert_plain(ours, parity.plain_runs(mlp), captured=captured)
