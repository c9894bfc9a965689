"""A server that only says which cache types the process knows that it spawns, and what it was told."""

import multiprocessing
import sys


def show():
    from minisgl.kvcache import SUPPORTED_CACHE_MANAGER

    print("types:", *SUPPORTED_CACHE_MANAGER.supported_names(), flush=True)


def launch_server():
    print("arguments:", *sys.argv[1:], flush=True)
    process = multiprocessing.get_context("spawn").Process(target=show)
    process.start()
    process.join()
    sys.exit(process.exitcode)
