"""Stands in for the launcher of transformers' distributed tests, which its source distribution lacks."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(world_size: int):
    """Makes a function `f(rank, *args)` of this process into `f(*args)` run by `world_size` gloo processes."""

    def decorate(function):
        def run(*args):
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            mp.spawn(_run_rank, (function, world_size, port, args), nprocs=world_size)

        return run

    return decorate


def _run_rank(rank: int, function, world_size: int, port: int, args) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    try:
        function(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
