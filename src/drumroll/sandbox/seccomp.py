"""The system calls that a program may not make, as a filter for the kernel (classic BPF, assembled by hand).

Everything else is allowed: namespaces, limits and a read-only tree contain the rest. A refused call fails with EPERM.
"""

from __future__ import annotations

import errno
import platform
import struct

from drumroll.errors import ConfigError

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of an architecture, and its column below."""
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network, and memory or files of other processes
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # objects that would outlive a run or escape memory accounting
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the scheduling of other processes
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # parts of the kernel with a history of vulnerabilities
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
}
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)
NEW_NAMESPACES = 0x7E020080
"""Bits of `clone` that ask for a namespace: user, pid, network, ipc, uts, mount, cgroup, time."""

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets of the call's number, the architecture and the low half of its first argument."""
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
X32 = 0x40000000


def program(machine: str | None = None) -> bytes:
    """Return the filter for this machine, or for one named as `uname -m` does."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ConfigError(f"sandbox.backend: bwrap has a system call filter for {' and '.join(MACHINES)}, not for '{machine}'.")
    number, column = MACHINES[machine]
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    code = [(LOAD, 0, 0, MACHINE), (JUMP_EQUAL, 1, 0, number), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":  # a second table of the same calls
        code += [(JUMP_AT_LEAST, 0, 1, X32), refuse]
    for numbers in REFUSED.values():
        if (call := numbers[column]) is not None:
            code += [(JUMP_EQUAL, 0, 1, call), refuse]
    # a filter cannot read clone3's flags, so it reports ENOSYS and the C library falls back to clone
    code += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    code += [(JUMP_EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_ANY_BIT, 0, 5, NEW_NAMESPACES), refuse]
    code += [(JUMP_EQUAL, 0, 3, PRLIMIT[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 1, 0, 0), refuse]
    code += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
