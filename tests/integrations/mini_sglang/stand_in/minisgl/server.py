"""A server that only reports the cache types that its spawned process knows, and its arguments."""

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
