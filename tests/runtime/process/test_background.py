"""Background threads run ops on one thread each, and compute keeps its threads."""

from concurrent.futures import ThreadPoolExecutor

import torch

from zinf_compile.runtime.process.background import run_alone


def test_only_the_thread_that_asks_runs_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1, initializer=run_alone) as alone, ThreadPoolExecutor(1) as other:
            assert alone.submit(torch.get_num_threads).result() == 1
            alone.submit(torch.ones(2**20).add, 1).result()
            assert alone.submit(torch.get_num_threads).result() == 1, "a first op must not reset the number of threads"
            assert other.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
