"""What a container leaves free, read from made-up trees of /proc and /sys, as Docker, Kubernetes and systemd make them.

The real one of the machine that runs the tests is read in test_memory.py.
"""

import pytest
import torch

from kvblocks.engine.run import memory
from kvblocks.engine.run.container import free_in_container
from kvblocks.engine.run.memory import free_memory, read_memory

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712

V2_MOUNT = "30 23 0:26 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {shown} {where} rw,relatime shared:12 - cgroup cgroup rw,memory"


def tree(root, groups, mounts, files):
    """Write what /proc/self says, and by path a group's files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in groups))
    (root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def v2(folder, limit, used, inactive=0, active=0, high="max"):
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.high": high,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 5\nactive_file {active}\ninactive_file {inactive}\nslab 7",
    }


def v1(folder, limit, used, inactive=0):
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": f"cache 5\ninactive_file 1\ntotal_active_file 0\ntotal_inactive_file {inactive}",
    }


TOP2, TOP1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
DOCKER = V2_MOUNT.format(shown="/")
V1 = V1_MOUNT.format(shown="/", where="/sys/fs/cgroup/memory")


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        pytest.param(["0::/"], [DOCKER], v2(TOP2, 2 * GIB, GIB // 2), 3 * GIB // 2, id="v2, a namespace of its own"),
        pytest.param(["0::/"], [DOCKER], v2(TOP2, 2 * GIB, GIB, GIB // 4, GIB // 4), 3 * GIB // 2, id="page cache"),
        pytest.param(["0::/"], [DOCKER], v2(TOP2, 2 * GIB, GIB, high=GIB + 7), 7, id="v2, throttled before the limit"),
        pytest.param(["0::/"], [DOCKER], v2(TOP2, "max", GIB), None, id="v2 without a limit"),
        pytest.param(["0::/"], [DOCKER], v2(TOP2, GIB, 2 * GIB), 0, id="v2, more used than the limit now allows"),
        pytest.param(
            ["0::/user/a/b"],
            [DOCKER],
            v2(f"{TOP2}/user", 3 * GIB, 2 * GIB) | v2(f"{TOP2}/user/a/b", "max", GIB) | v2(f"{TOP2}/user/a", GIB, 9),
            GIB - 9,
            id="v2, limits of the groups above",
        ),
        pytest.param(
            ["0::/docker/ab"],
            [V2_MOUNT.format(shown="/docker/ab")],
            v2(TOP2, 2 * GIB, GIB),
            GIB,
            id="v2, the machine's path, and a mount that begins there",
        ),
        pytest.param(["0::/../x"], [DOCKER], v2(TOP2, 2 * GIB, GIB), GIB, id="v2, a group outside the namespace"),
        pytest.param(["5:memory:/"], [V1], v1(TOP1, 2 * GIB, GIB, GIB // 2), 3 * GIB // 2, id="v1"),
        pytest.param(["5:memory:/"], [V1], v1(TOP1, UNLIMITED_V1, GIB), UNLIMITED_V1 - GIB, id="v1 without a limit"),
        pytest.param(
            ["6:cpu,cpuacct:/other", "5:memory:/docker/ab"],
            [V1_MOUNT.format(shown="/docker/ab", where="/sys/fs/cgroup/memory"), "31 23 0:28 / /sys rw - tmpfs x rw"],
            v1(TOP1, 2 * GIB, GIB),
            GIB,
            id="v1, a container without a namespace",
        ),
        pytest.param(
            ["5:memory:/a", "0::/a"],
            [V1_MOUNT.format(shown="/", where="/sys/fs/with\\040blank"), V2_MOUNT.format(shown="/")],
            v1("sys/fs/with blank/a", GIB, 5) | {f"{TOP2}/a/cgroup.procs": "1"},
            GIB - 5,
            id="both versions, memory in v1, a mount with a blank",
        ),
        pytest.param(["0::/"], [DOCKER], {f"{TOP2}/memory.max": GIB}, None, id="a limit whose use isn't known"),
        pytest.param([], ["", "x - ", "1 2 3 - cgroup2"], {}, None, id="no groups, and lines that say nothing"),
    ],
)
def test_what_a_container_leaves(tmp_path, groups, mounts, files, expected):
    assert free_in_container(tree(tmp_path, groups, mounts, files)) == expected


def test_a_system_without_groups_sets_no_limit(tmp_path):
    assert free_in_container(tmp_path) is None


@pytest.mark.parametrize(("left", "expected"), [(1000, 1000), (3000, 2000), (None, 2000)])
def test_the_tighter_of_machine_and_container_counts(monkeypatch, left, expected):
    monkeypatch.setattr(memory, "_free_on_machine", lambda: 2000)
    monkeypatch.setattr(memory, "free_in_container", lambda: left)
    cpu = torch.device("cpu")
    assert free_memory(cpu) == expected and read_memory(0.5, cpu) == expected // 2
