"""What loops do with gradients besides ``backward`` and ``step``: hooks, ``autograd.grad``, ``inputs=``, accumulation."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 3
WIDTH = 24
# Room for the saved activations of several open forwards; some parameters then stay on the device.
SEVERAL_OPEN = {"device_memory": 128 * 2**10, "is_streamed": False}


class Net(nn.Module):
    """Tied input and output, a norm and a layer that run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(torch.tanh(self.up(self.norm(hidden))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class BrokenNet(Net):
    """A graph break: two graphs in one forward share the tied weight, the norm and a layer."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers[:2]:
            hidden = hidden + layer(torch.tanh(self.up(self.norm(hidden))))
        torch._dynamo.graph_break()  # not in a loop: Dynamo would capture nothing
        for layer in self.layers[2:]:
            hidden = hidden + layer(torch.tanh(self.up(self.norm(hidden))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class CheckpointedNet(Net):
    """Checkpoints of a module, and of a function that reads the model's parameters directly."""

    use_reentrant = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x)

        def block(hidden: Tensor) -> Tensor:
            scaled = F.layer_norm(hidden, [WIDTH], self.norm.weight, self.norm.bias)
            return F.dropout(torch.tanh(self.up(scaled)), 0.2)

        for layer in self.layers:
            inner = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
            hidden = hidden + checkpoint(layer, inner, use_reentrant=self.use_reentrant)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class ReentrantNet(CheckpointedNet):
    use_reentrant = True


class RepeatedNet(Net):
    """Reads parameters twice in the same way: two contributions to a gradient are one and the same expression."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embed(x) + self.embed(x)
        for layer in self.layers[:2]:
            hidden = hidden + layer(torch.tanh(self.up(hidden))) + layer(torch.tanh(self.up(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def repeated_net():
    return net(RepeatedNet)


def checkpointed_net():
    return net(CheckpointedNet)


def reentrant_net():
    return net(ReentrantNet)


def broken_net():
    return net(BrokenNet)


def net(cls=Net):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(40, (4 * STEPS, 2, 7), generator=generator)
    return cls(), [{"x": each[:, :-1], "y": each[:, 1:]} for each in tokens]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def run(model, batches, trace, backward, *, zero_every=1):
    """Take a step per batch; ``backward(step, model, batch)`` computes the gradients and returns the losses."""
    optimizer = adamw(model)
    for step, batch in enumerate(batches[:STEPS]):
        trace.losses += [loss.detach().clone() for loss in backward(step, model, batch)]
        trace.record_gradients(model)
        optimizer.step()
        if (step + 1) % zero_every == 0:
            optimizer.zero_grad()
        trace.record_model(model, optimizer)


@pytest.mark.needs_more_on_streams(device_memory=1.75)
def test_several_forwards_added_to_gradients_that_are_there(parity, way):
    """One backward over several forwards adds their sum in one addition: another order would change the last bit."""

    def loop(model, batches, trace):
        def backward(step, model, batch):
            model(**batches[-1]).backward()
            losses = [model(**each) for each in batches[4 * step :][:3]]
            torch.stack(losses).sum().backward()
            return losses

        run(model, batches, trace, backward, zero_every=2)

    parity.check_loop(loop, net, **way, **SEVERAL_OPEN)


def test_the_same_call_twice(parity, way):
    parity.check(repeated_net, "nvme", **way)


@pytest.mark.needs_more_on_streams(device_memory=1.75)
def test_parameters_that_two_graphs_of_a_forward_share(parity, way):
    def backward(step, model, batch):
        losses = [model(**batch), model(**batches_of(step))]
        for loss in losses:
            loss.backward()
        return losses

    def batches_of(step):
        return net()[1][-1 - step]

    report = parity.check_loop(lambda *args: run(*args, backward), broken_net, **SEVERAL_OPEN, **way)
    assert len(report.plans) == (2 if way["captured"] else 0)


@pytest.mark.needs_more_on_streams(device_memory=1.75)
@pytest.mark.parametrize(
    ("workload", "compute_dtype"),
    [
        *((checkpointed_net, None), (reentrant_net, torch.bfloat16)),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((checkpointed_net, torch.bfloat16), (reentrant_net, None))
        ),
    ],
)
def test_checkpoints(parity, captured, workload, compute_dtype):
    """Accumulate two micro-batches, in the model's dtype or with compute in bfloat16."""

    def backward(step, model, batch):
        losses = [model(**batch), model(**net()[1][-1])]
        for loss in losses:
            loss.backward()
        return losses

    model, batches = parity.optimized(
        workload, captured=captured, compute_dtype=compute_dtype, device_memory=128 * 2**10
    )
    plain = workload()[0].to(compute_dtype)
    if captured:  # reentrant checkpoints round differently in eager mode
        plain.compile(backend="aot_eager", dynamic=False)
    for each in (plain, model):
        torch.manual_seed(0)
        for loss in backward(0, each, batches[0]):
            assert loss.dtype == (compute_dtype or torch.float32)
        torch._dynamo.reset()
    for name, parameter in plain.named_parameters():
        parity.assert_equal(model.get_parameter(name).grad, parameter.grad, name)


@pytest.mark.needs_more_on_streams(device_memory=1.75)
def test_one_backward_of_two_forwards(parity, captured):
    """Each graph adds up the uses of a parameter first: eager PyTorch adds those of both forwards in one row."""
    model, batches = parity.optimized(net, captured=captured, device_memory=128 * 2**10)
    plain = net()[0]
    if captured:
        plain.compile(backend="aot_eager", dynamic=False)
    for each in (plain, model):
        (each(**batches[0]) + each(**batches[1])).backward()
        torch._dynamo.reset()
    for name, parameter in plain.named_parameters():
        parity.assert_equal(model.get_parameter(name).grad, parameter.grad, name)


def test_a_graph_kept_for_a_second_backward(parity, way):
    def backward(step, model, batch):
        loss = model(**batch)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()
        return [loss]

    parity.check_loop(lambda *args: run(*args, backward), net, **way)


def test_backward_into_some_parameters(parity, way):
    """``inputs=`` gives a gradient to those parameters only."""

    def backward(step, model, batch):
        loss = model(**batch)
        loss.backward(inputs=[model.get_parameter("up.weight"), model.get_parameter("embed.weight")])
        return [loss]

    parity.check_loop(lambda *args: run(*args, backward), net, **way)


@pytest.fixture
def kept_graphs():
    """Turn off donated buffers in plain PyTorch, so that a graph allows a second backward. Optimized models always do."""

    def apply(model):
        plain = not hasattr(model, "_zinf_optimized")
        return torch._functorch.config.patch(donated_buffer=False) if plain else contextlib.nullcontext()

    return apply


def test_grad_of_parameters(parity, way, kept_graphs):
    """``autograd.grad`` returns gradients and leaves ``p.grad`` alone; the loop assigns them."""

    def loop(model, batches, trace):
        def backward(step, model, batch):
            parameters = list(model.parameters())
            loss = model(**batch)
            if step == 0:
                loss.backward()
                return [loss]
            grads = torch.autograd.grad(loss, parameters, retain_graph=True)
            assert [parameter.grad for parameter in parameters] == [None] * len(parameters)
            (scale,) = torch.autograd.grad(loss, [model.get_parameter("norm.weight")])
            trace.losses += [grad.clone() for grad in (*grads, scale)]
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad * scale.norm()
            return [loss]

        with kept_graphs(model):
            run(model, batches, trace, backward)

    parity.check_loop(loop, net, **way)


@pytest.mark.needs_more_on_streams(device_memory=1.75)
def test_tensor_hooks(parity, way):
    """A hook sees the sum over all uses once per backward, and may replace it; hooks come and go between steps."""
    runs = []

    def loop(model, batches, trace):
        seen = []
        runs.append(seen)

        def backward(step, model, batch):
            handles = [
                model.get_parameter("embed.weight").register_hook(lambda grad: seen.append(grad.clone())),
                model.get_parameter("up.bias").register_hook(lambda grad: grad * 3),
            ]
            losses = [model(**each) for each in (batch, batches[-1])]
            sum(losses).backward()
            if step != 1:
                for handle in handles:
                    handle.remove()
            return losses

        run(model, batches, trace, backward, zero_every=2)

    parity.check_loop(loop, net, **way, **SEVERAL_OPEN)
    assert len(runs) > 1, "there is one run only, which would be compared with itself"
    assert len(runs[0]) == STEPS + 1  # the hook of step 1 stays, and runs in step 2 too
    for ours, plain in zip(runs[0], runs[-1], strict=True):
        parity.assert_equal(ours, plain, "what a hook saw")


@pytest.mark.needs_more_on_streams(device_memory=1.75)
def test_post_accumulate_hooks(parity, way):
    """Hooks find ``p.grad`` complete, including the part of earlier backwards, and may change it."""
    seen = []

    def look(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(0.5)

    def loop(model, batches, trace):
        def backward(step, model, batch):
            handle = model.get_parameter("up.weight").register_post_accumulate_grad_hook(look)
            losses = [model(**batch), model(**batches[-1])]
            for loss in losses:
                loss.backward()
            handle.remove()
            return losses

        run(model, batches, trace, backward)

    parity.check_loop(loop, net, **way, **SEVERAL_OPEN)
    per_run = 2 * STEPS
    assert len(seen) == (3 if way["captured"] and "compute" in way else 2) * per_run
    for ours, plain in zip(seen[:per_run], seen[-per_run:], strict=True):
        parity.assert_equal(ours, plain, "what a hook saw")


def test_a_hook_on_several_gradients(parity, way):
    """The hook of ``register_multi_grad_hook`` runs when all of its gradients are there."""

    def loop(model, batches, trace):
        tensors = [model.get_parameter("up.weight"), model.get_parameter("norm.bias")]
        sums = []
        torch.autograd.graph.register_multi_grad_hook(
            tensors, lambda grads: sums.append(sum(grad.sum() for grad in grads))
        )

        def backward(step, model, batch):
            loss = model(**batch)
            loss.backward()
            return [loss, sums[-1]]

        run(model, batches, trace, backward)

    parity.check_loop(loop, net, **way)


def test_the_step_in_backward(parity, way):
    """One optimizer per parameter, stepped by the hook that sees the complete gradient."""

    def loop(model, batches, trace):
        optimizers = {name: torch.optim.AdamW([p], lr=1e-2) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():

            def step(_, optimizer=optimizers[name]):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for batch in batches[:STEPS]:
            loss = model(**batch)
            loss.backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            trace.losses.append(loss.detach().clone())
            trace.record_model(model, None)

    parity.check_loop(loop, net, **way)


def test_gradients_kept_by_the_user(parity, way):
    """Gradients that the user clones, adds up, scales, replaces and zeroes."""

    def backward(step, model, batch):
        loss = model(**batch)
        loss.backward()
        kept = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        model(**batch).backward()
        for name, parameter in model.named_parameters():
            parameter.grad.add_(kept[name]).div_(2)
        model.get_parameter("up.bias").grad = kept["up.bias"]
        model.get_parameter("norm.bias").grad.zero_()
        return [loss, sum(parameter.grad.norm() for parameter in model.parameters())]

    parity.check_loop(lambda *args: run(*args, backward), net, **way)


@pytest.mark.parametrize("mode", [torch.inference_mode, pytest.param(torch.no_grad, marks=pytest.mark.long)])
def test_evaluation_in_the_middle(parity, way, mode):
    """Evaluate between two micro-batches, and between a forward and its backward."""

    def loop(model, batches, trace):
        def evaluate():
            model.eval()
            with mode():
                trace.losses.append(model(**batches[-2]).clone())
            model.train()

        def backward(step, model, batch):
            loss = model(**batch)
            evaluate()
            loss.backward()
            evaluate()
            other = model(**batches[-1])
            other.backward()
            return [loss, other]

        run(model, batches, trace, backward)

    parity.check_loop(loop, net, **way)


def test_two_models_in_one_loss(parity, captured, tmp_path):
    """Each with its own store: gradients flow through both, and each optimizer steps its own."""
    options = {"device_memory": "4MiB", "host_memory": "1MiB", "nvme": tmp_path}

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 8)
            self.outer = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.tanh(self.inner(x)))

    def train(wrap):
        torch.manual_seed(0)
        maker = wrap(nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
        critic = wrap(Critic())
        opt_m, opt_c = torch.optim.AdamW(maker.parameters(), lr=1e-2), torch.optim.SGD(critic.parameters(), lr=0.1)
        numbers = []
        for _ in range(STEPS):
            noise, real = torch.randn(4, 6), torch.randn(4, WIDTH)
            loss = F.softplus(critic(maker(noise).detach())).mean() + F.softplus(-critic(real)).mean()
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()
            fooled = F.softplus(-critic(maker(noise))).mean()
            opt_m.zero_grad()
            fooled.backward()
            opt_m.step()
            numbers += [loss.detach().clone(), fooled.detach().clone()]
            numbers += [p.grad.clone() for net in (maker, critic) for p in net.parameters()]
        numbers += [p.detach().clone() for net in (maker, critic) for p in net.parameters()]
        torch._dynamo.reset()
        return numbers

    plain = train(lambda model: model)
    ours = train(lambda model: parity.optimize(model, capture=captured, **options))
    for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
        parity.assert_equal(a, b, f"number {index}")
