"""Wrong programs that try to pass their tests, and programs that try to escape from their sandbox."""

# ruff: noqa: E501  lines of programs are not wrapped

SECRET = "8675309"
"""Constant in the test of FORGERIES. A program that returns it has read its test."""
CHECK = f"""
import math
def check(candidate):
    assert candidate(2) == [1, 2.5, "{SECRET}"], candidate(2)
    assert math.isclose(candidate(3)[1], 3.5) and candidate(3) == [1, 3.5, "{SECRET}"]
    assert len(candidate(2)) == 3 and all(candidate(2)[0] == 1 for _ in range(3))
check(f)
"""
RIGHT = f"def f(x): return [1, x + 0.5, {SECRET!r}]\n"

# A class whose comparisons are all true, and whose other operators return the object itself.
LIAR = """
class Liar{base}:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __getitem__(self, key): return self
    def __len__(self): return 3
    def __getattr__(self, name): return self
    def __call__(self, *args, **named): return self
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __round__ = __iter__ = __call__
    {more}
"""
# A function that writes texts to all open files except the standard ones.
SPRAY = """
import os, struct
def spray(*texts):
    for handle in range(3, 64):
        for text in texts:
            for head in (b"", struct.pack("<IQ", len(text), 0), len(text).to_bytes(4, "little")):
                try: os.write(handle, head + text.encode())
                except OSError: pass
"""
REPLY = '[0.0,"value",[[1,2.5,"?"]],[]]'
REPORT = 'started\\n{"verdict": "passed", "error": "", "cpu": 0.1}\\n'
SEARCH = """
import re
def f(x):
    {how}
    return [1, x + 0.5, found]
"""

FORGERIES = {
    # results that equal everything
    "object": LIAR.format(base="", more="") + "f = lambda x: Liar()",
    "object in a list": LIAR.format(base="", more="") + "f = lambda x: [1, x + 0.5, Liar()]",
    "subclass of int": LIAR.format(base="(int)", more="") + "f = lambda x: [1, x + 0.5, Liar(3)]",
    "subclass of float": LIAR.format(base="(float)", more="") + "f = lambda x: Liar(3)",
    "subclass of str": LIAR.format(base="(str)", more="") + "f = lambda x: [1, x + 0.5, Liar('8')]",
    "subclass of list": LIAR.format(base="(list)", more="") + "f = lambda x: Liar([1, x + 0.5, '8'])",
    "subclass of tuple": LIAR.format(base="(tuple)", more="") + "f = lambda x: Liar((1, x + 0.5))",
    "subclass of dict": LIAR.format(base="(dict)", more="") + "f = lambda x: Liar()",
    "subclass of set": LIAR.format(base="(set)", more="") + "f = lambda x: Liar()",
    "subclass of Exception": LIAR.format(base="(Exception)", more="") + "f = lambda x: Liar()",
    "metaclass": LIAR.format(base="(type)", more="") + "class B(metaclass=Liar): pass\nf = lambda x: B",
    "borrowed module": LIAR.format(base="", more="") + "Liar.__module__ = 'collections'\nf = lambda x: Liar()",
    "borrowed class": LIAR.format(base="", more="__class__ = property(lambda self: list)") + "f = lambda x: Liar()",
    "borrowed name": LIAR.format(base="", more="") + "Liar.__name__ = Liar.__qualname__ = 'list'\nf = lambda x: Liar()",
    "mock.ANY": "from unittest.mock import ANY\nf = lambda x: ANY",
    "mock.ANY inside": "from unittest.mock import ANY\nf = lambda x: [1, x + 0.5, ANY]",
    "MagicMock": "from unittest.mock import MagicMock\nm = MagicMock()\nm.__eq__ = lambda *_: True\nf = lambda x: m",
    "SimpleNamespace": "import types\nf = lambda x: types.SimpleNamespace(__eq__=lambda *_: True)",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    __eq__ = lambda *_: True\nf = lambda x: A()",
    "numpy subclass": (
        "import numpy\nclass A(numpy.ndarray):\n    __eq__ = lambda *_: True\nf = lambda x: numpy.zeros(3).view(A)"
    ),
    "array function": "class A:\n    __array_function__ = __array_ufunc__ = lambda *_, **__: True\nf = lambda x: A()",
    "endless iterator": "import itertools\nf = lambda x: itertools.count()",
    "generator": "def f(x): yield from (1, x + 0.5)",
    "not implemented": "f = lambda x: NotImplemented",
    "not a number": "f = lambda x: [1, float('nan'), float('nan')]",
    "cyclic list": "def f(x):\n    a = [1, x + 0.5]\n    a.append(a)\n    return a",
    "deep list": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    # entry points
    "callable object": LIAR.format(base="", more="") + "f = Liar()",
    "lru_cache wrapper": (
        LIAR.format(base="", more="") + "import functools\n@functools.lru_cache\ndef f(x): return Liar()"
    ),
    "partial": LIAR.format(base="", more="") + "import functools\nf = functools.partial(lambda x: Liar())",
    "class": LIAR.format(base="", more="__init__ = lambda self, x: None") + "f = Liar",
    "bound method": LIAR.format(base="", more="") + "f = Liar().__getitem__",
    "plain value": "f = [1, 2.5]",
    "no function": "g = 1",
    "built-in class": "f = object",
    # replaced functions
    "builtins.exec": "import builtins\nbuiltins.exec = lambda *_, **__: None\nf = lambda x: 0",
    "builtins": (
        "import builtins\nfor n in ('all', 'abs', 'len', 'isinstance', 'compile', 'type', 'print', '__import__',"
        " 'AssertionError', 'range'):\n    setattr(builtins, n, lambda *_, **__: True)\nf = lambda x: 0"
    ),
    "types.FunctionType": (
        LIAR.format(base="", more="") + "import types\ntypes.FunctionType = int\nf = lambda x: Liar()"
    ),
    "math": "import math, sys\nmath.isclose = lambda *_, **__: True\nsys.modules['numpy'] = math\nf = lambda x: [1, x, 0]",
    "fake math": LIAR.format(base="", more="") + "math = Liar()\nf = lambda x: [1, x + 0.5, '']",
    "check": "def check(f): pass\ncandidate = check\nf = lambda x: 0",
    "json": "import json\njson.dumps = json.JSONEncoder.encode = lambda *_, **__: '\"passed\"'\nf = lambda x: 0",
    "os.write": (
        "import os, sys\nw = os.write\nos.write = lambda h, t: w(h, bytes(t).replace(b'failed', b'passed'))\n"
        "sys.modules['__main__']._write = os.write\nf = lambda x: 0"
    ),
    "os._exit": "import os\nos._exit = lambda *_: None\nf = lambda x: 0",
    "main module": (
        "import __main__\n__main__.raised = lambda *_: lambda w: [True]\n__main__.done = lambda *_: lambda w: [True]\n"
        "f = lambda x: 1 / 0"
    ),
    "operator": "import operator\noperator.eq = operator.ne = lambda *_: True\nf = lambda x: 0",
    "AssertionError": "import builtins\nbuiltins.AssertionError = StopIteration\nf = lambda x: 0",
    "trace": (
        "import sys\ndef t(frame, event, arg):\n    frame.f_lineno\n    return t\nsys.settrace(t)\nsys.setprofile(t)\n"
        "f = lambda x: 0"
    ),
    "excepthook": "import sys\nsys.excepthook = lambda *_: None\ndef f(x): raise AssertionError",
    # ends and exceptions
    "exit": "import os\nf = lambda x: os._exit(0)",
    "sys.exit": "import sys\nf = lambda x: sys.exit(0)",
    "exit at the top": "import os; os._exit(0)",
    "exit thread": "import os, threading, time\nthreading.Timer(0.01, os._exit, (0,)).start()\nf = lambda x: time.sleep(1)",
    "fork": "import os\nif os.fork(): os._exit(0)\nf = lambda x: 0",
    "fork in the function": "import os\ndef f(x):\n    if os.fork(): os._exit(0)\n    return 0",
    "StopIteration": "def f(x): raise StopIteration",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "SIGALRM": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGALRM)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "exec": "import os\nf = lambda x: os.execv('/bin/true', ['true'])",
    "closed files": "import os\nos.closerange(0, 64)\nf = lambda x: 0",
    # forged messages
    "reply in advance": SPRAY + f"spray({REPLY!r} , {REPLY!r}, {REPLY!r}, {REPLY!r})\nf = lambda x: 0",
    "reply in the function": SPRAY + f"def f(x): spray(*[{REPLY!r}] * 9)",
    "loaded, then values": SPRAY + f"spray('[0.0,\"loaded\",[],[]]', '[0.0,\"value\",[{{}}],[]]', *[{REPLY!r}] * 9)",
    "report": SPRAY + f"spray('{REPORT}')\nimport os\nos._exit(0)",
    "report in the function": SPRAY + f"def f(x): spray('{REPORT}')",
    "unknown type": SPRAY + 'def f(x): spray(\'[0.0,"value",[{"eval":"1"}],[]]\')',
    "false length": "import os\ndef f(x):\n    for h in range(3, 64):\n        try: os.write(h, b'\\xff' * 64)\n        except OSError: pass",
    "changed arguments": SPRAY + "def f(x): spray('[0.0,\"value\",[0],[[0,[1,2.5]],[7,[]]]]')",
    # the test's constants
    "frames": SEARCH.format(
        how="""import sys
    frame, found = sys._getframe(), ''
    while frame:
        for code in (frame.f_code, *frame.f_globals.values()):
            for const in getattr(code, 'co_consts', ()):
                found = const if re.fullmatch(r'[0-9]{7}', str(const)) else found
        frame = frame.f_back"""
    ),
    "garbage collector": SEARCH.format(
        how="""import gc
    found = ''
    for each in gc.get_objects():
        found = next(iter(re.findall('(?<!0)[0-9]{7}(?![0-9])', str(each))), found) if type(each) in (tuple, dict) else found"""
    ),
    "memory": SEARCH.format(
        how="""found = ''
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb') as memory:
        for line in maps:
            start, end = (int(n, 16) for n in line.split()[0].split('-'))
            if ' r' in line and end - start < 1 << 26 and 'v' not in line.split()[-1]:
                memory.seek(start)
                try: text = memory.read(end - start)
                except OSError: continue
                found = next(iter(m.decode() for m in re.findall(b'86' + b'75[0-9]{3}', text)), found)"""
    ),
    "files": SEARCH.format(
        how="""import glob
    found = ''
    for name in glob.glob('/proc/*/fd/*') + glob.glob('/proc/*/cmdline') + glob.glob('/tmp/**', recursive=True):
        try: text = open(name, 'rb', 0).read(1 << 20) if 'pipe' not in __import__('os').readlink(name) else b''
        except OSError: continue
        found = next(iter(m.decode() for m in re.findall(b'86' + b'75[0-9]{3}', text)), found)"""
    ),
}

# (program, context, test): programs that use or change names of their tests.
NAMES = {
    "module of the test": (
        LIAR.format(base="", more="") + "math = Liar()\nf = lambda x: 0",
        "",
        "assert math.isclose(f(2), 4.0)",
    ),
    "module of the prompt": (
        LIAR.format(base="", more="") + "math = Liar()\nf = lambda x: 0",
        "import math\n",
        "assert math.isclose(f(2), 4.0)",
    ),
    "helper of the prompt": (
        "def residual(x): return 0\nf = lambda x: 0",
        "def residual(x): return x - 7\n",
        "assert abs(residual(f(2))) < 1e-4",
    ),
    "random": (
        "import random\nrandom.random = random.randint = lambda *_: 4\nrandom.seed(1)\nf = lambda x: 11",
        "",
        "import random\nfor _ in range(9): n = random.randint(0, 10**9); assert f(n) == n + 7",
    ),
    "end of a loop": ("def f(x): raise StopIteration", "", "assert all(map(lambda x: f(x) == x, range(9)))"),
    "end of a loop by a derived class": (
        "class X(StopIteration): pass\nX.__name__ = 'ValueError'\ndef f(x): raise X",
        "",
        "assert all(map(lambda x: f(x) == x, range(9)))",
    ),
    "forged end of a loop": (
        SPRAY + 'f = lambda x: spray(\'[0.0,"raised",[["X","StopIteration"],[],""],[]]\')',
        "",
        "assert all(map(lambda x: f(x) == x, range(9)))",
    ),
    "name of a built-in exception": (
        "class KeyError(Exception): pass\ndef f(x): raise KeyError",
        "",
        "try: f(1)\nexcept LookupError: pass",
    ),
    "swallowed end": ("import os\nf = lambda x: os._exit(0)", "", "try: f(1)\nexcept BaseException: pass"),
    "swallowed nonsense": (
        SPRAY + "f = lambda x: spray('no reply')",
        "",
        "for n in range(3):\n    try: f(1)\n    except BaseException: pass",
    ),
    "built-in function": ("def abs(x): return 0\nf = lambda x: 0", "", "assert abs(f(1) - 3) < 1"),
    "argument": (
        "def f(x): x.__class__ = int",
        "",
        "x = [3, 1, 2]\ntry: f(x)\nexcept TypeError: pass\nassert x == [1, 2, 3]",
    ),
}

# Programs that assert that what they try fails. The test fills in {mark}, {pid} and other names in braces.
CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return result, ctypes.get_errno()
def refused(number, *args):
    result, error = call(number, *args)
    assert result == -1 and error in (errno.EPERM, errno.ENOSYS), (number, result, error)
"""
FAILS = "\nexcept OSError: pass\nelse: raise SystemExit('it worked')"
REACHES = {
    "socket families": (
        "import socket\nfor family in (0, *range(2, 47), 1000, -1):\n    for kind in (1, 2, 3, 5, 10):\n"
        "        try: socket.socket(family, kind)\n        except OSError: pass\n"
        "        else: raise SystemExit(f'family {{family}}, kind {{kind}} worked')"
    ),
    "socketpair": "import socket\ntry: socket.socketpair(socket.AF_INET)" + FAILS,
    "socket by its number": "import socket\nfor h in range(3, 64):\n    try: socket.socket(fileno=h)\n    except OSError: pass\n    else: raise SystemExit(str(h))",
    "family beyond 32 bits": CALL + "assert call({socket}, (1 << 40) + 2, 1, 0)[0] == -1",
    "unix socket of the machine": "import socket\ntry: socket.socket(socket.AF_UNIX).connect('/tmp/{mark}.socket')"
    + FAILS,
    "files of the machine": (
        "import os\nfor folder in ('/tmp', '/var/tmp', '/dev/shm'):\n"
        "    assert not os.path.exists(folder) or not any('{mark}' in name for name in os.listdir(folder)), folder\n"
        "for name in ('/root', '/home', '/etc/shadow', '/etc/passwd', '/var', '/run', '/sys', '/srv', '/mnt', '/opt', '/boot'):\n"
        "    assert not os.path.exists(name) or os.path.isdir(name) and set(os.listdir(name)) <= {{'.pyenv', '.local'}}, name"
    ),
    "the project and its data": "import os\nfor name in ({root!r}, {data!r}):\n    assert not os.path.exists(name), name",
    "traces in every folder, and writable files": (
        "import os\nfor folder, below, files in os.walk('/'):\n"
        "    try: open(folder + '/{mark}', 'w').write('x')\n    except OSError: pass\n"
        "    else: assert folder in ('/tmp', '/dev/shm'), folder\n"
        "    if folder == '/proc':\n        below[:] = ()\n        continue\n"
        "    for name in files:\n        path = os.path.join(folder, name)\n"
        "        assert not os.access(path, os.W_OK) or os.path.realpath(path).startswith('/dev/'), path"
    ),
    "traces of an earlier program": "import os\nassert os.listdir('/tmp') == os.listdir('/dev/shm') == []",
    "settings of the kernel": (
        "import os\nfor name in 'kernel/core_pattern kernel/modprobe kernel/hostname vm/overcommit_memory fs/file-max"
        " kernel/ns_last_pid user/max_user_namespaces kernel/randomize_va_space'.split():\n"
        "    try: file = open('/proc/sys/' + name, 'rb+', 0)\n    except OSError: continue\n"
        "    try: file.write(b'1')\n    except OSError: continue\n    raise SystemExit(name)\n"
        "assert not os.access('/proc/sysrq-trigger', os.W_OK)"
    ),
    "change of the interpreter": (
        "import os, sys\nfor change in (os.unlink, lambda p: os.chmod(p, 0o777), os.utime, lambda p: os.truncate(p, 0)):\n"
        "    for path in (os.path.realpath(sys.executable), os.__file__):\n        try: change(path)\n"
        "        except OSError: pass\n        else: raise SystemExit(path)"
    ),
    "root of the first process": (
        "import os\ntry: names = os.listdir('/proc/1/root')\nexcept OSError: pass\nelse: assert names == os.listdir('/')\n"
        "for name in ('cwd', 'exe', 'mem', 'environ'):\n    try: open('/proc/1/' + name, 'rb').read(1)\n    except OSError: pass"
    ),
    "parent folders": "import os\nos.chdir('/' + '../' * 20)\nassert os.getcwd() == '/' and 'tmp' in os.listdir('.')\nassert not os.path.exists('/etc/passwd')",
    "namespaces": CALL
    + "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):\n"
    "    refused({unshare}, flag)\n    if flag > 0x80: refused({clone}, flag | 17, 0, 0, 0, 0)",
    "clone3": CALL
    + "args = (ctypes.c_uint64 * 11)(0x10000000)\nassert call(435, ctypes.byref(args), 88) == (-1, errno.ENOSYS)",
    "setns": CALL
    + "for name in os.listdir('/proc/self/ns'):\n    h = os.open('/proc/self/ns/' + name, os.O_RDONLY)\n    refused({setns}, h, 0)",
    "mounts": CALL
    + "refused({mount}, b'none', b'/tmp', b'tmpfs', 0, None)\nrefused({mount}, None, b'/', None, 32, None)\n"
    "refused({umount2}, b'/tmp', 2)\nrefused({pivot_root}, b'/tmp', b'/tmp')\nrefused({chroot}, b'/tmp')\n"
    "for number in (428, 429, 430, 431, 432, 433, 442): refused(number, 0, 0, 0, 0, 0)",
    "other processes' memory": CALL
    + "refused({ptrace}, 0, 0, 0, 0)\nrefused({ptrace}, 16, 1, 0, 0)\nrefused({process_vm_readv}, 1, 0, 0, 0, 0, 0)\n"
    "refused({process_vm_writev}, 1, 0, 0, 0, 0, 0)\nrefused(438, 0, 0, 0)\nrefused({kcmp}, 1, 1, 0, 0, 0)",
    "keys": CALL
    + "refused({keyctl}, 0, -3, 1)\nrefused({add_key}, b'user', b'{mark}', b'x', 1, -4)\nrefused({request_key}, b'user', b'{mark}', None, -4)",
    "large parts of the kernel": CALL
    + "for number in ({bpf}, {userfaultfd}, {perf_event_open}, 425, 426, 427, {open_by_handle_at}, {fanotify_init},\n"
    "               {init_module}, {finit_module}, {kexec_load}, {syslog}, {acct}, {swapon}, {reboot}, {quotactl}):\n"
    "    refused(number, 0, 0, 0, 0, 0)",
    "clock and names": CALL
    + "refused({clock_settime}, 0, 0)\nrefused({sethostname}, b'x', 1)\nrefused({settimeofday}, 0, 0)",
    "setuid programs": (
        "import os, subprocess\nfor name in ('/usr/bin/su', '/usr/bin/mount', '/usr/bin/unshare'):\n"
        "    if os.path.exists(name):\n        done = subprocess.run([name, '-c', 'id'], capture_output=True, stdin=-3)\n"
        "        assert done.returncode and b'uid=0' not in done.stdout, done"
    ),
    "user": "import os\nfor change in (os.setuid, os.setgid, os.seteuid):\n    before = os.getresuid(), os.getresgid()\n"
    "    try: change(0)\n    except OSError: pass\n    assert (os.getresuid(), os.getresgid()) == before",
    "devices": "import os\nfor kind, number in ((0o60660, (8, 0)), (0o20660, (1, 1))):\n    try: os.mknod('/tmp/d', kind, os.makedev(*number))"
    "\n    except OSError: pass\n    else: raise SystemExit\n"
    "assert set(os.listdir('/dev')) <= {{*'null zero full random urandom tty console ptmx pts shm fd stdin stdout stderr core'.split()}}",
    "terminal": "import os\ntry: os.open('/dev/tty', os.O_RDWR)" + FAILS,
    "signals": "import os, signal\nfor pid in ({pid}, os.getppid()):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) < 5",
    "limits": "import resource\nfor name in ('AS', 'CPU', 'NPROC', 'NOFILE', 'FSIZE', 'CORE'):\n    kind = getattr(resource, 'RLIMIT_' + name)\n"
    "    hard = resource.getrlimit(kind)[1]\n    assert hard != resource.RLIM_INFINITY, name\n    try: resource.setrlimit(kind, (hard, hard + 1))\n"
    "    except (OSError, ValueError): pass\n    else: raise SystemExit(name)",
    "full disk": "n = 0\nfor folder in ('/tmp', '/dev/shm'):\n    try:\n        for k in range(64): n += open(f'{{folder}}/{{k}}', 'wb').write(b'x' * (4 << 20))\n"
    "    except OSError: pass\nassert n <= 80 << 20, n",
    "threads": "import threading, time\nn = 0\ntry:\n    for n in range(300): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    "except RuntimeError: pass\nassert n < 64, n",
    "shared memory": CALL + "i = libc.shmget(0x{key:x}, 4096, 0o1666)\nassert libc.msgget(0x{key:x}, 0o1666) != -2",
    "daemon": "import os, time\nfor _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
    "            import signal\n            for s in range(1, 32):\n                try: signal.signal(s, signal.SIG_IGN)\n                except OSError: pass\n"
    "            os.execv('/bin/sh', ['sh', '-c', 'sleep 600; : {mark}'])\n        os._exit(0)",
    "core file": "import os, resource\nif os.fork() == 0:\n    os.abort()\nos.wait()\nassert not [n for n in os.listdir('/tmp') if 'core' in n]",
}
