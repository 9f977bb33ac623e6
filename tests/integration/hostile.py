"""Programs that attack the sandbox or its grading. Each prints ESCAPED, or passes its tests, only if the attack works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.sandbox import Assert, Call, Limits, Pytest, Status, Stdio, Test

SQUARE: Sequence[Test] = (Stdio("3\n", "9\n"),)
CALLS: Sequence[Test] = (Call("f", [7], 49), Assert("assert f(8) == 64"))
RAISES = (
    "import pytest\nfrom solution import f\ndef test_f():\n    with pytest.raises(Exception): f(-1)\n    assert f(2) == 4\n"
)
ROOMY = Limits(seconds=60)
BRIEF = Limits(seconds=1)
SMALL = Limits(seconds=60, memory_mb=160)
BAD = frozenset(Status) - {Status.PASSED}
ENDED = frozenset({Status.FAILED, Status.ERROR})


@dataclass(frozen=True)
class Hostile:
    """A program, its tests, and the statuses it may get."""

    name: str
    program: str
    tests: Sequence[Test] = SQUARE
    statuses: frozenset[Status] = BAD
    limits: Limits = ROOMY


def only(*statuses: Status) -> frozenset[Status]:
    return frozenset(statuses)


def refused(name: str, attempt: str, imports: str = "os") -> Hostile:
    """An attempt that must raise."""
    body = "\n".join(f"    {line}" for line in attempt.splitlines())
    return Hostile(
        name, f"import {imports}\ntry:\n{body}\n    print('ESCAPED')\nexcept Exception as e:\n    print(e)\n", statuses=ENDED
    )


def syscall(name: str, *numbers: tuple[int, int], arguments: str = "0, 0, 0, 0, 0, 0") -> Hostile:
    """Raw system calls, by their numbers on x86_64 and aarch64: each must fail, and not for a bad argument alone."""
    code = f"""
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
for pair in {numbers!r}:
    number = pair[platform.machine() == "aarch64"]
    done = libc.syscall(number, {arguments})
    if done != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print("ESCAPED", number, done, ctypes.get_errno())
"""
    return Hostile(name, code, statuses=ENDED)


RESOURCES = [
    Hostile("loop", "while True: pass", statuses=only(Status.TIMEOUT), limits=BRIEF),
    Hostile("sleep", "import time; time.sleep(1000)", statuses=only(Status.TIMEOUT), limits=BRIEF),
    Hostile("fork bomb", "import os\nwhile True: os.fork()", limits=BRIEF),
    Hostile(
        "fork bomb that sleeps",
        "import os, signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True:\n"
        "    try:\n        if os.fork() == 0: time.sleep(1000)\n    except OSError: time.sleep(0.01)",
        statuses=only(Status.TIMEOUT),
        limits=BRIEF,
    ),
    Hostile(
        "thread bomb",
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "    except RuntimeError: time.sleep(0.01)",
        statuses=only(Status.TIMEOUT),
        limits=BRIEF,
    ),
    Hostile("memory", "x = []\nwhile True: x.append(bytearray(10 << 20))", statuses=only(Status.MEMORY), limits=SMALL),
    Hostile(
        "memory of many processes",
        "import os, time\nfor _ in range(8): os.fork()\nx = bytearray(os.urandom(1 << 20) * 60)\ntime.sleep(1000)",
        statuses=only(Status.MEMORY, Status.ERROR, Status.CRASHED),
        limits=SMALL,
    ),
    Hostile(
        "mapped memory", "import mmap\nm = mmap.mmap(-1, 4 << 30)", statuses=only(Status.ERROR, Status.MEMORY), limits=SMALL
    ),
    Hostile(
        "memory errors caught",
        "x = []\nwhile True:\n    try: x.append(bytearray(1 << 20))\n    except MemoryError: pass",
        statuses=only(Status.TIMEOUT, Status.MEMORY),
        limits=Limits(seconds=1, memory_mb=160),
    ),
    Hostile(
        "zip bomb",
        "import zlib\nd = zlib.compressobj(9)\nb = b''.join(d.compress(bytes(1 << 20)) for _ in range(400)) + d.flush()\n"
        "print(len(zlib.decompress(b)))",
        statuses=only(Status.MEMORY),
        limits=SMALL,
    ),
    Hostile("output", "while True: print('x' * 10000)", statuses=only(Status.OUTPUT)),
    Hostile("errors without end", "import sys\nwhile True: print('x' * 10000, file=sys.stderr)", statuses=only(Status.OUTPUT)),
    Hostile("one long line", "import os\nos.write(1, b'x' * (8 << 20))", statuses=only(Status.OUTPUT)),
    Hostile("big integers", "print(len(str(3 ** (10 ** 9))))", statuses=only(Status.TIMEOUT, Status.MEMORY), limits=BRIEF),
    Hostile(
        "full disk",
        "total = 0\ntry:\n    for n in range(10000):\n        with open(f'/tmp/{n}', 'wb') as f: total += f.write(bytes(8 << 20))\n"
        "except OSError as e: print(e)\nif total > 100 << 20: print('ESCAPED')",
        statuses=only(Status.FAILED, Status.ERROR, Status.MEMORY),
    ),
    Hostile("a large file", "f = open('/tmp/x', 'wb')\nf.truncate(1 << 40)\nprint('ESCAPED')", statuses=only(Status.ERROR)),
    Hostile(
        "many files",
        "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'w').close()",
        statuses=only(Status.MEMORY, Status.TIMEOUT),
    ),
    Hostile("deep folders", "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"),
    Hostile("locked folders", "import os\nos.makedirs('a/b/c')\nopen('a/b/c/f', 'w')\nos.chmod('a/b', 0)\nos.chmod('/tmp', 0)"),
    Hostile("links to outside", "import os\nos.symlink('/usr', 'usr')\nos.symlink('/', 'root')\nos.symlink('loop', 'loop')"),
    Hostile(
        "a pipe in a file", "import os\nos.mkfifo('/tmp/pipe')\nopen('/tmp/pipe')", statuses=only(Status.TIMEOUT), limits=BRIEF
    ),
]

ISOLATION = [
    refused("socket", "socket.create_connection(('1.1.1.1', 53), 2)", "socket"),
    refused("udp", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))", "socket"),
    refused("names", "socket.getaddrinfo('example.com', 80)", "socket"),
    refused("a web page", "urllib.request.urlopen('http://127.0.0.1:1', timeout=2)", "urllib.request"),
    refused("local sockets", "socket.socket(socket.AF_UNIX).bind('/tmp/s')", "socket"),
    refused("/etc/shadow", "open('/etc/shadow').read()"),
    refused("/etc/passwd", "open('/etc/passwd').read()"),
    refused("home", "assert os.listdir('/root') or os.listdir('/home')"),
    refused("becoming root", "os.setuid(0)"),
    Hostile(
        "environment of others",
        "import os\nfor p in [*filter(str.isdigit, os.listdir('/proc')), 'self']:\n    try: t = open(f'/proc/{p}/environ').read()\n"
        "    except OSError: continue\n    if 'PATH' in t or 'HOME' in t or '=/' in t.replace('PWD=/', ''): print('ESCAPED', t)\n"
        "if set(os.environ) - {'PWD', 'LC_CTYPE'}: print('ESCAPED', os.environ)",
        statuses=ENDED,
    ),
    Hostile(
        "memory of others",
        "import os\nfor p in filter(str.isdigit, os.listdir('/proc')):\n    if int(p) in (1, os.getpid()): continue\n"
        "    for n in ('mem', 'environ', 'maps', 'fd/3', 'fd/4', 'fd/5', 'root/etc', 'cwd/x'):\n"
        "        try: open(f'/proc/{p}/{n}', 'rb').read(1); print('ESCAPED', p, n)\n        except OSError: pass",
        statuses=ENDED,
    ),
    Hostile(
        "writing outside",
        "import os\nfor p in ('/x', '/usr/x', '/box.zip', '/pytest.zip', '/test_program.py', '/etc/x', '/dev/x', '/dev/shm/x', '/proc/x',\n"
        "          '/proc/sys/kernel/core_pattern', '/proc/sys/vm/drop_caches', '/sys/x', '/var/x', '/run/x'):\n"
        "    try: open(p, 'w').write('x'); print('ESCAPED', p)\n    except OSError: pass",
        statuses=ENDED,
    ),
    Hostile(
        "devices",
        "import os\nfor n in ('mem', 'kmem', 'kmsg', 'port', 'sda', 'vda', 'nvme0n1', 'fuse', 'kvm', 'net/tun', 'loop-control', 'nvidia0'):\n"
        "    for how in (os.O_RDONLY, os.O_RDWR):\n        try: os.open(f'/dev/{n}', how); print('ESCAPED', n)\n        except OSError: pass\n"
        "try: os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0)); print('ESCAPED')\nexcept OSError: pass",
        statuses=ENDED,
    ),
    refused("mounting", "m = ctypes.CDLL(None, use_errno=True)\nassert m.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0", "ctypes"),
    syscall("namespaces", (272, 97), (308, 268), arguments="0x10000000, 0, 0, 0, 0, 0"),
    syscall("cloned namespaces", (56, 220), (435, 435), arguments="0x10000011, 0, 0, 0, 0, 0"),
    syscall("traces", (101, 117), (310, 270), (311, 271), (438, 438), arguments="16, 1, 0, 0, 0, 0"),
    syscall("limits of others", (302, 261), arguments="2, 7, 0, 0, 0, 0"),
    syscall("priorities", (141, 140), (203, 122), (144, 119), (251, 30), arguments="0, 2, 19, 0, 0, 0"),
    syscall("memory that stays", (29, 194), (64, 190), (68, 186), (319, 279), (248, 217), (188, 5), arguments="0, 4096, 0x3ff, 0, 0, 0"),
    syscall("dark corners", (321, 280), (298, 241), (323, 282), (425, 425), (300, 262), (135, 92), (161, 51), (169, 142)),
    Hostile(
        "the second table of calls",
        "import ctypes, errno, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if platform.machine() == 'x86_64' and libc.syscall(0x40000000 + 41, 2, 1, 0) != -1: print('ESCAPED')",
        statuses=ENDED,
    ),
    Hostile(
        "a fresh process",
        "import subprocess\np = subprocess.run(['/usr/bin/python3', '-c', 'import socket; socket.socket(); print(1)'], capture_output=True)\n"
        "if p.stdout: print('ESCAPED')",
        statuses=ENDED,
    ),
    Hostile("a null pointer", "import ctypes\nctypes.string_at(0)", statuses=only(Status.CRASHED)),
    Hostile("abort", "import os\nos.abort()", statuses=only(Status.CRASHED)),
    Hostile("killing the parent", "import os\nos.kill(os.getppid(), 9)\nwhile True: pass", statuses=only(Status.CRASHED)),
    Hostile("killing everyone", "import os\nos.kill(-1, 9)\nwhile True: pass", statuses=only(Status.CRASHED)),
    Hostile("killing the first", "import os\nfor s in (9, 15, 6): os.kill(1, s)\nos.kill(2, 9)\nwhile True: pass"),
    Hostile("stopping the parent", "import os\nos.kill(os.getppid(), 19)\nwhile True: pass", statuses=only(Status.TIMEOUT), limits=BRIEF),
    Hostile("stopping the zygote", "import os\nos.kill(2, 19)", limits=BRIEF),
    Hostile(
        "deaf to signals",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        statuses=only(Status.TIMEOUT),
        limits=BRIEF,
    ),
    Hostile(
        "a daemon",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\nprint(0)",
        statuses=only(Status.FAILED),
    ),
    Hostile("a thread that stays", "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()\nprint(9)",
            statuses=only(Status.TIMEOUT), limits=BRIEF),
    Hostile("recursion", "def f(n): return f(n + 1)\nf(0)", statuses=only(Status.ERROR)),
    Hostile(
        "stack overflow",
        "import sys\nsys.setrecursionlimit(10 ** 9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        statuses=only(Status.CRASHED, Status.MEMORY, Status.ERROR),
    ),
    Hostile("deep nesting", "x = " + "(" * 100_000 + ")" * 100_000, statuses=only(Status.ERROR, Status.CRASHED, Status.MEMORY)),
    Hostile("deep expression", "x = " + "-" * 200_000 + "1", statuses=only(Status.ERROR, Status.CRASHED, Status.MEMORY)),
    Hostile("broken text", "print('\udcff\ud800')", statuses=only(Status.ERROR)),
    Hostile("null bytes", "print(9)\x00", statuses=only(Status.ERROR)),
    Hostile("a wrong encoding", "# -*- coding: utf-99 -*-\nprint(8)"),
    Hostile("more input than there is", "input(), print(int(input()) ** 2)", statuses=only(Status.ERROR)),
]  # fmt: skip

SECRET = "SECRET-" + "4711"
HUNT = """
import ctypes, gc, re, sys
pattern = re.compile("SECRET-" + "[0-9]+")
def f():
    found = []
    frame = sys._getframe()
    while frame:
        found += pattern.findall(repr(frame.f_locals)) + pattern.findall(repr(frame.f_globals))
        frame = frame.f_back
    for thing in gc.get_objects():
        try: found += pattern.findall(repr(thing)) if isinstance(thing, (str, bytes, list, dict, tuple)) else []
        except Exception: pass
    maps = [line.split() for line in open("/proc/self/maps")] if dumpable() else []
    for line in maps:
        if line[1].startswith("rw"):
            low, high = (int(n, 16) for n in line[0].split("-"))
            found += pattern.findall(ctypes.string_at(low, high - low).decode("latin1"))
    return found[0] if found else ""
def dumpable():
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    return True
"""
FORGE = """
import json, os, struct
replies = []
for value in (True, 49, 64, {"nonce": "", "why": "ended", "exit": 0, "seconds": 0, "stdout": "9", "stderr": "", "verdicts": []}):
    for message in ({"passed": True, "why": ""}, {"value": value}, value, {"collected": 1}):
        data = json.dumps(message).encode()
        replies.append(struct.pack("<I", len(data)) + data)
def forge():
    for fd in range(3, 256):
        for data in (*replies, b"R", b"passed"):
            try: os.write(fd, data)
            except OSError: break
"""
CHEATS = [
    Hostile("printing passed", "print('passed')\nprint('1 passed in 0.01s')\nprint({'passed': True})", statuses=only(Status.FAILED)),
    Hostile("the right answer, then a failure", "print(9)\nraise SystemExit(3)", statuses=only(Status.ERROR)),
    Hostile("the right answer, then a crash", "import os\nprint(9, flush=True)\nos.abort()", statuses=only(Status.CRASHED)),
    Hostile("the right answer, then a loop", "print(9, flush=True)\nwhile True: pass", statuses=only(Status.TIMEOUT), limits=BRIEF),
    Hostile("an exit function", "import atexit\natexit.register(print, 'passed')\nprint(0)", statuses=only(Status.FAILED)),
    Hostile("sys.exit", "import sys\nsys.exit(0)", CALLS),
    Hostile("os._exit", "import os\nos._exit(0)", CALLS, only(Status.ERROR)),
    Hostile("sys.exit in a call", "import sys\ndef f(n): sys.exit(0)", CALLS),
    Hostile("os._exit in a call", "import os\ndef f(n): os._exit(0)", CALLS, only(Status.ERROR)),
    Hostile("a crash in a call", "import os\ndef f(n): os.abort()", CALLS, only(Status.CRASHED)),
    Hostile("a loop in a call", "def f(n):\n    while True: pass", CALLS, only(Status.TIMEOUT), BRIEF),
    Hostile("memory in a call", "def f(n): return bytearray(1 << 40)", CALLS, only(Status.MEMORY)),
    Hostile("equal to everything", "class A:\n    def __eq__(self, o): return True\n    __ne__ = lambda s, o: False\n"
            "    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n    def __iter__(self): return iter([])\n"
            "    def __hash__(self): return 1\ndef f(n): return A()",
            (*CALLS, Assert("assert not (f(1) != 1)"), Assert("assert 5 in f(1)"), Assert("assert f(1) in [3]"), Assert("assert f(1) > 10")),
            only(Status.FAILED)),
    Hostile("a number equal to everything", "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef f(n): return I(0)",
            CALLS, only(Status.FAILED)),
    Hostile("zero differences", "class A:\n    def __sub__(self, o): return 0\n    __rsub__ = __sub__\n    def __abs__(self): return 0\ndef f(n): return A()",
            (Assert("assert abs(f(2) - 4) < 1e-6"), Assert("assert abs(4 - f(2)) < 1e-6")), only(Status.FAILED)),
    Hostile("patched built-ins", "import builtins\nfor n in ('abs', 'all', 'sorted', 'len', 'AssertionError', 'set', 'sum'):\n"
            "    setattr(builtins, n, lambda *a, **k: True)\ndef f(n): return 0", CALLS),
    Hostile("shadowed built-ins", "for n in ('abs', 'all', 'sorted', 'len', 'isinstance', 'AssertionError', 'set', 'sum'):\n"
            "    globals()[n] = lambda *a, **k: True\ndef f(n): return [3]",
            (Assert("assert sorted(f(1)) == [1, 2]"), Assert("assert len(f(1)) == 9"), Assert("assert all(x == 1 for x in f(1))")),
            only(Status.FAILED)),
    Hostile("patched modules", "import math\nclass M:\n    isclose = staticmethod(lambda *a, **k: True)\nmath = M\ndef f(n): return 3",
            (Assert("assert math.isclose(f(2), 4)"),), only(Status.FAILED)),
    Hostile("patched json", "import json, sys\njson.dumps = lambda *a, **k: '{\"value\": 49, \"passed\": true}'\n"
            "for m in list(sys.modules.values()):\n    if getattr(m, '__name__', '').startswith('inside'):\n"
            "        for n in ('send', 'frame', 'same'): setattr(m, n, lambda *a, **k: True)\ndef f(n): return 49", CALLS, limits=BRIEF),
    Hostile("an assertion that never fails", "import sys\nclass E(BaseException):\n    def __new__(cls, *a): return SystemExit(0)\n"
            "__builtins__['AssertionError'] = E if isinstance(__builtins__, dict) else None\ndef f(n): raise SystemExit(0)", CALLS),
    Hostile("hunting for the tests", HUNT, (Assert(f"assert f() == '{SECRET}'"), Call("f", [], SECRET))),
    Hostile("hunting for what was before", HUNT, (Assert("assert f()"),)),
    Hostile("hunting for the output", HUNT + "print(f())", (Stdio("", SECRET),)),
    Hostile("forging replies", FORGE + "forge()\nprint(0)"),
    Hostile("forging verdicts", FORGE + "forge()\ndef f(n): forge(); return 0", CALLS),
    Hostile("forging from a thread", FORGE + "import threading\ndef g():\n    while True: forge()\n"
            "threading.Thread(target=g, daemon=True).start()\ndef f(n): return 0", CALLS, limits=Limits(seconds=5)),
    Hostile("nothing but a name", "f = 49", CALLS, only(Status.FAILED)),
    Hostile("endless values", "def f(n):\n    while True: yield n", CALLS, only(Status.TIMEOUT, Status.MEMORY, Status.FAILED), Limits(1, 160)),
    Hostile("nested values", "def f(n):\n    x = []\n    for _ in range(100000): x = [x]\n    return x", CALLS, limits=Limits(seconds=20)),
    Hostile("changing arguments", "def f(n):\n    n.clear(); n.append(0)\n    return 0", (Assert("x = [1, 2]\nf(x)\nassert x == [2, 4]"),), only(Status.FAILED)),
    Hostile("skipping", "import unittest\ndef f(n): raise unittest.SkipTest('x')", (Pytest(RAISES.replace("Exception", "OSError")),)),
    Hostile("dying where an exception is wanted", "import os\ndef f(n): os._exit(0)", (Pytest(RAISES),)),
    Hostile("ending pytest", "def f(n): raise KeyboardInterrupt", (Pytest(RAISES),)),
    Hostile("own tests", "def test_one(): pass\ndef test_two(): pass\nclass pytest: pass\ndef f(n): return 0",
            (Pytest("import pytest\nfrom solution import *\n" + RAISES.partition("import f\n")[2]),), only(Status.FAILED)),
    Hostile("files for pytest", "import os\nfor n in ('conftest.py', 'pytest.ini', 'sitecustomize.py', 'test_program.py', 'pytest.py', 'solution.py'):\n"
            "    open(f'/tmp/{n}', 'w').write('import os; os._exit(0)')\ndef f(n): return 0", (Pytest(RAISES),), only(Status.FAILED)),
    Hostile("pytest without tests", "f = 1", (Pytest("x = 1\n"),)),
]  # fmt: skip

ALL = [*RESOURCES, *ISOLATION, *CHEATS]
