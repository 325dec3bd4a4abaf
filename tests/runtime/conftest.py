"""Storage, transfers and updates at run time. Each test has a time limit."""

from tests.support.guard import guard as guard
