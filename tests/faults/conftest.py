"""Training with faults: disk errors, signals and stalls. Each test has a time limit."""

from tests.support.guard import guard as guard
