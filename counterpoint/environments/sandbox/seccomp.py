"""The filter of system calls for code in the sandbox: no processes, no sockets, nothing that administers or debugs a system.

Commands of a box (`builder`) may start processes and use sockets, and nothing more than code. Without root, the first process of
their namespace, which is ours, has their user: they may not change its limits or its share of a processor.

A refused call fails with EPERM. Calls of another architecture's ABI (32 bits, x32) kill the process, since their numbers mean
something else. The kernel keeps the filter for the rest of the process's life.
"""

from __future__ import annotations

import ctypes
import os
import struct

_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET, _ARGUMENT_BYTES = 0, 4, 16, 8
_CLONE_THREAD = 0x00010000
_CLONE_NEW_NAMESPACES = 0x7E020080
_X32_BIT = 0x40000000
_SET_MODE_FILTER = 1
_SYNCHRONISE_THREADS = 1

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SECCOMP = {"x86_64": 317, "aarch64": 277}

# fmt: off
_REFUSED = {
    # name: (x86_64, aarch64); None where an architecture lacks it
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "seccomp": (317, 277),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "acct": (163, 89), "syslog": (103, 116), "quotactl": (179, 60),
    "personality": (135, 92), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "vhangup": (153, 58), "nfsservctl": (180, 42),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "mbind": (237, 235), "migrate_pages": (256, 238), "move_pages": (279, 239), "set_mempolicy": (238, 237),
}
# fmt: on
_OF_COMMANDS = {
    "fork",
    "vfork",
    "execve",
    "execveat",
    "socket",
    "connect",
    "bind",
    "listen",
    "pidfd_open",
    "pidfd_send_signal",
    "shmget",
    "shmat",
    "msgget",
    "semget",
    "mq_open",
    "memfd_create",
    "sched_setscheduler",
    "setpriority",
    "ioprio_set",
}  # fmt: skip
"""What commands may do beside code."""
_FIRST_PROCESS = 1
_OF_A_PROCESS = {
    # name: (x86_64, aarch64)
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
}  # fmt: skip
"""Calls that commands may not make for the first process."""
_ONE_PROCESS = {"setpriority": 0, "ioprio_set": 1}
"""Of those, where another argument stands before the process: its value for one process. Others mean all of a group or user."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: sockets of the network's namespace. One of AF_VSOCK could reach the machine's host."""


def _refuse(error: int) -> int:
    return _ERRNO | error


def filter_program(machine: str, *, commands: bool = False) -> bytes:
    """Returns the filter as BPF instructions for `machine`, as `os.uname` names it; for `commands` of a box, or for code."""
    column = tuple(_ARCHITECTURES).index(machine)
    names = _REFUSED.keys() - _OF_COMMANDS if commands else _REFUSED.keys()
    refused = sorted(number for name in names if (number := _REFUSED[name][column]) is not None)
    instruction = struct.Struct("=HBBI").pack
    program = [
        instruction(_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        instruction(_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        instruction(_RETURN, 0, 0, _KILL_PROCESS),
        instruction(_LOAD, 0, 0, _NUMBER_OFFSET),
        instruction(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        instruction(_RETURN, 0, 0, _KILL_PROCESS),
        # The arguments of clone3 are in memory, which a filter cannot see; without it, the C library uses clone.
        instruction(_JUMP_EQUAL, 0, 1, _CLONE3),
        instruction(_RETURN, 0, 0, _refuse(_ENOSYS)),
    ]
    for number in refused:
        program += [instruction(_JUMP_EQUAL, 0, 1, number), instruction(_RETURN, 0, 0, _refuse(_EPERM))]
    if commands:
        socket_number = _REFUSED["socket"][column]
        assert socket_number is not None
        program += [
            instruction(_JUMP_EQUAL, 0, len(_FAMILIES) + 3, socket_number),
            instruction(_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
            *(instruction(_JUMP_EQUAL, len(_FAMILIES) - place, 0, each) for place, each in enumerate(_FAMILIES)),
            instruction(_RETURN, 0, 0, _refuse(_EPERM)),
            instruction(_RETURN, 0, 0, _ALLOW),
        ]
        for name, numbers in _OF_A_PROCESS.items():
            argument, of_one = _FIRST_ARGUMENT_OFFSET, list[bytes]()
            if name in _ONE_PROCESS:
                of_one = [instruction(_LOAD, 0, 0, argument), instruction(_JUMP_EQUAL, 0, 2, _ONE_PROCESS[name])]
                argument += _ARGUMENT_BYTES
            of_one += [
                instruction(_LOAD, 0, 0, argument),
                instruction(_JUMP_EQUAL, 0, 1, _FIRST_PROCESS),
                instruction(_RETURN, 0, 0, _refuse(_EPERM)),
                instruction(_RETURN, 0, 0, _ALLOW),
            ]
            program += [instruction(_JUMP_EQUAL, 0, len(of_one), numbers[column]), *of_one]
    program += [
        instruction(_JUMP_EQUAL, 1, 0, _CLONE[machine]),
        instruction(_RETURN, 0, 0, _ALLOW),
        instruction(_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        instruction(_JUMP_ANY_BIT, 0, 1, _CLONE_NEW_NAMESPACES),
        instruction(_RETURN, 0, 0, _refuse(_EPERM)),
    ]
    if not commands:  # threads only
        program += [
            instruction(_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD),
            instruction(_RETURN, 0, 0, _refuse(_EPERM)),
        ]
    return b"".join([*program, instruction(_RETURN, 0, 0, _ALLOW)])


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def install(*, commands: bool = False) -> None:
    """Puts the filter on this process, which must have set `no_new_privs`."""
    machine = os.uname().machine
    instructions = filter_program(machine, commands=commands)
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.cast(memory, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(_SECCOMP[machine]),
        ctypes.c_uint(_SET_MODE_FILTER),
        ctypes.c_uint(_SYNCHRONISE_THREADS),
        ctypes.byref(program),
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
