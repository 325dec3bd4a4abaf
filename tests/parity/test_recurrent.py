"""Modules of torch that keep lists of their weights: Dynamo does not capture them, and they gather eagerly."""

from tests.support.small_models import recurrent


def test_lstm(parity, captured):
    parity.check(recurrent, "nvme", captured=captured)
