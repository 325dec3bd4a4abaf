"""Modules of torch that keep lists of their weights: Dynamo does not capture them, and they gather eagerly."""

import gc

import torch
from torch import nn

import zinf_compile
from tests.support.small_models import recurrent
from zinf_compile.runtime.execute.saved_tensors import GATHERED, GatheredStorages


def test_lstm(parity, captured):
    parity.check(recurrent, "nvme", captured=captured)


def test_gathered_weights_of_an_lstm_are_freed(parity):
    """Torch would keep them in the module's own list, and move them into one storage on a GPU."""
    parity.on_streams()
    model, batches = recurrent()
    parity.optimize(model, capture=False, device_memory="64MiB", host_memory="64MiB")
    parity.train(model, batches)
    gc.collect()
    assert not any(
        noted() is not None for noted, record in GATHERED._records.values() if record.name.startswith("lstm")
    )
    assert all(isinstance(weight, nn.Parameter) for weight in model.lstm._flat_weights)
    assert zinf_compile.report(model).num_eager_gathers == len(batches) * len(list(model.parameters()))


def test_a_value_that_was_given_another_storage_is_not_found(parity):
    """Its old storage is freed, and a tensor with that address is not the parameter."""
    model = parity.optimize(recurrent()[0], device_memory="64MiB", host_memory="64MiB")
    storages, value, other = GatheredStorages(), torch.ones(4), torch.ones(4)
    record = next(model.parameters())._zinf_record
    storages.note(value, record)
    assert storages.find(value.view(2, 2)) is record
    storages._records[other.untyped_storage()._cdata] = storages._records[value.untyped_storage()._cdata]
    assert storages.find(other) is None
