"""Triton's interpreter as the tests run it: every address checked, and several times faster.

Triton's own reads and writes whatever an address says: beyond a tensor that is another tensor, or the end of the process. Here a
launch raises `OutsideTensor` before it happens. A pointer remembers the tensor argument that it was made from, and must stay
between that tensor's first and last element; one that has lost its tensor must stay within some tensor of the launch. Gaps
between the rows of a tensor with strides are not looked for.

The time goes into patching `triton.language` anew at every call of a device function, and into types that are made anew for
every value. Here the language is patched once a launch, and what a type says is kept. Results are those of the stock interpreter
in every bit, but for bf16 denormals, 254 of which that one converts to other numbers.

`install` fits triton 3.3 to 3.9. It replaces private names of triton, so where one is missing or takes other arguments, nothing
is replaced. CACTUS_STOCK_INTERPRETER=1 keeps it from replacing anything, to compare.
"""

import contextlib
import functools
import inspect
import os
from collections import Counter

import numpy as np

accesses = Counter()  # elements whose address was checked so far, by kind of access
_launches = []  # the launch that runs, if any
_replaced = []  # (owner, name, what triton had there)
_why_not = "it was not installed"


class OutsideTensor(Exception):
    """A kernel reads or writes outside the tensors that it was given."""


class Home:
    """The addresses of a tensor: [first, end) in bytes, and what it is, in words."""

    def __init__(self, tensor):
        size, numel = tensor.element_size(), tensor.numel()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.first = tensor.data_ptr()
        self.end = self.first + size * (1 + last) if numel else self.first
        self.what = (
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )

    def outside(self, low, high):
        """How far bytes low .. high - 1 reach outside, in words; None where they do not."""
        if self.first <= low and high <= self.end:
            return None
        before, beyond = max(self.first - low, 0), max(high - self.end, 0)
        how_far = f"{beyond} bytes beyond its end" if beyond >= before else f"{before} bytes before its start"
        return f"{how_far}: a tensor {self.what}"


class Launch:
    """A launch that runs: its kernel's name, its tensors, which modules are patched, and what it did wrong."""

    def __init__(self, kernel):
        self.kernel, self.homes, self.patched, self.error = kernel, [], set(), None

    def check(self, kind, pointers, mask):
        """Count the addresses of an access that the mask (None: all) lets through, and raise where one is outside."""
        at = pointers.data
        if mask is not None:
            mask = np.broadcast_to(mask.data, at.shape)
            if not mask.all():
                at = at[mask != 0]
        if at.size == 0:
            return
        accesses[kind] += at.size
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        low, high = int(at.min()), int(at.max()) + size
        home = getattr(pointers, "home", None)
        if home is None and len(self.homes) > 1:
            self._check_each(kind, at, size)
            return
        home = home or self.homes[0]
        if (found := home.outside(low, high)) is not None:
            bad = ((at < home.first) | (at + np.uint64(size) > home.end)).sum()
            self._raise(kind, bad, at.size, found)

    def _check_each(self, kind, at, size):
        # Of a pointer that has lost its tensor: in some one, else reported against the one that is nearest.
        bad = np.ones(at.shape, dtype=bool)
        for home in self.homes:
            bad &= (at < home.first) | (at + np.uint64(size) > home.end)
        if bad.any():
            low = int(at[bad].min())
            nearest = min(self.homes, key=lambda home: max(home.first - low, low + size - home.end))
            self._raise(kind, bad.sum(), at.size, nearest.outside(low, low + size))

    def _raise(self, kind, bad, count, how_far):
        self.error = OutsideTensor(f"{self.kernel}: a {kind} of {count} elements, {bad} of them up to {how_far}")
        raise self.error


def install():
    """Replace parts of the interpreter. Where that cannot be, `header` says why."""
    global _why_not
    if os.environ.get("TRITON_INTERPRET") != "1":
        _why_not = "TRITON_INTERPRET is not set: kernels run on the device"
        return
    if os.environ.get("CACTUS_STOCK_INTERPRETER") == "1":
        _why_not = "CACTUS_STOCK_INTERPRETER=1 is set"
        return
    try:
        import triton.runtime.interpreter as interpreter
    except ImportError as error:
        _why_not = f"triton has no interpreter here: {error}"
        return
    replacements = _replacements(interpreter)
    _why_not = _misfit(replacements)
    if _why_not is None:
        for owner, name, _, make in replacements:
            stock = getattr(owner, name)
            _replaced.append((owner, name, stock))
            setattr(owner, name, functools.wraps(stock)(make(stock)))


def installed():
    """Whether the interpreter checks addresses."""
    return bool(_replaced)


def header():
    """A line for pytest: which interpreter runs, and why."""
    if installed():
        return "triton's interpreter: fast, every address checked (tests/support/interpreter.py)"
    return f"triton's interpreter: as triton has it, if at all, addresses unchecked: {_why_not}"


@contextlib.contextmanager
def stock():
    """Within it, triton's interpreter is as triton has it."""
    ours = [(owner, name, getattr(owner, name)) for owner, name, _ in _replaced]
    for owner, name, theirs in _replaced:
        setattr(owner, name, theirs)
    try:
        yield
    finally:
        for owner, name, mine in ours:
            setattr(owner, name, mine)


def _misfit(replacements):
    """Why the replacements do not fit this triton, in words, or None."""
    import triton

    for owner, name, parameters, _ in replacements:
        found = getattr(owner, name, None)
        if found is None:
            return f"triton {triton.__version__} has no {owner.__name__}.{name}"
        takes = tuple(inspect.signature(found).parameters)[: len(parameters)]
        if takes != parameters:
            return f"{owner.__name__}.{name} of triton {triton.__version__} takes {takes}, not {parameters}"
    return None


def _replacements(interpreter):
    """What is replaced: (owner, name, its first parameters, a function from what triton has there to what replaces it)."""
    import triton.language as tl

    builder, core = interpreter.InterpreterBuilder, tl.core
    tensor, block_type = core.tensor, core.block_type

    def launch(call):
        def launched(self, *args, **kwargs):
            _launches.append(Launch(self.fn.__name__))
            try:
                return call(self, *args, **kwargs)
            except interpreter.InterpreterError:
                if _launches[-1].error is not None:  # said once, not once for every device function on the way
                    raise _launches[-1].error from None
                raise
            finally:
                _launches.pop()

        return launched

    def patch_once(patch):
        def patched(fn):
            if not _launches:
                return patch(fn)
            # The values of a function's globals that `_patch_lang` looks for.
            found = {id(x) for x in fn.__globals__.values() if x is tl or x is core}
            if found and found <= _launches[-1].patched:
                return None
            _launches[-1].patched |= found
            return patch(fn)

        return patched

    def remember_tensor(convert):
        def converted(arg):
            result = convert(arg)
            if hasattr(arg, "data_ptr") and _launches:
                home = Home(getattr(arg, "base", arg))  # a tensor in triton's wrapper, or itself
                result.handle.home = home
                _launches[-1].homes.append(home)
            return result

        return converted

    def keep_home(create):
        def created(self, *args, **kwargs):
            result = create(self, *args, **kwargs)
            for arg in args:
                if isinstance(arg, interpreter.TensorHandle) and hasattr(arg, "home"):
                    result.home = arg.home
            return result

        return created

    def check(kind, pointers_at, mask_at):
        def checking(access):
            def checked(self, *args, **kwargs):
                if _launches:
                    _launches[-1].check(kind, args[pointers_at], None if mask_at is None else args[mask_at])
                return access(self, *args, **kwargs)

            return checked

        return checking

    def exact_bf16(cast):
        def cast_impl(self, src, dst_type):
            if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
                bits = src.data.view(np.uint16).astype(np.uint32) << np.uint32(16)
                return interpreter.TensorHandle(bits.view(np.float32), dst_type.scalar)
            return cast(self, src, dst_type)

        return cast_impl

    def keep_types(init):
        kept = {}

        def block(self, element_ty, shape):
            space = getattr(element_ty, "address_space", None)
            key = element_ty.__class__, element_ty.name, space, *[getattr(n, "value", n) for n in shape]
            if key not in kept:
                init(self, element_ty, shape)
                kept[key] = self.__dict__ | {"_of_tensors": {}}
            self.__dict__.update(kept[key])
            self.element_ty = element_ty

        return block

    def keep_shapes(init):
        def made(self, handle, type):
            kept = type.__dict__.get("_of_tensors")
            if kept is None:
                kept = type._of_tensors = {}
            if not kept:
                init(self, handle, type)
                kept.update({k: v for k, v in self.__dict__.items() if k not in ("handle", "type", "dtype")})
            self.__dict__.update(kept)
            self.handle, self.type, self.dtype = handle, type, type.scalar

        return made

    def unwrap_fast(unwrap):
        plain = {tensor, int, float, bool, str, type(None)}

        def unwrapped(o):
            kind = o.__class__
            if kind in plain:
                return o
            return o.value if kind is core.constexpr else unwrap(o)

        return unwrapped

    def keep_np_dtype(convert):
        kept = {}

        def converted(tt_dtype):
            if tt_dtype.__class__ is not core.dtype:
                return convert(tt_dtype)
            if tt_dtype.name not in kept:
                kept[tt_dtype.name] = convert(tt_dtype)
            return kept[tt_dtype.name]

        return converted

    def keep_numbers(check):
        """Operands of the same type need nothing; a number beside a tensor is made into one of its type and shape once."""
        plain = {
            "fp32": (int, float),
            "fp64": (int, float),
            "int32": (int,),
            "int64": (int,),
            "uint32": (int,),
            "int1": (),
        }
        kept = {}

        def checked(self, lhs, rhs, *args, **kwargs):
            left, right = lhs.__class__, rhs.__class__
            if left is tensor and right is tensor:
                a, b = lhs.type, rhs.type
                if (
                    a.__class__ is b.__class__
                    and lhs.dtype.__class__ is core.dtype
                    and lhs.dtype.name == rhs.dtype.name
                ):
                    if lhs.dtype.name in plain and lhs.handle.data.shape == rhs.handle.data.shape:
                        return lhs, rhs
                elif args[:1] == (True,) and lhs.dtype.is_ptr() and a.__class__ is b.__class__ and rhs.dtype.is_int():
                    if lhs.handle.data.shape == rhs.handle.data.shape:
                        return lhs, rhs
                return check(self, lhs, rhs, *args, **kwargs)
            number, x = (lhs, rhs) if right is tensor else (rhs, lhs)
            if x.__class__ is not tensor or number.__class__ not in plain.get(getattr(x.dtype, "name", None), ()):
                return check(self, lhs, rhs, *args, **kwargs)
            key = x.dtype.name, x.type.__class__, x.handle.data.shape, number.__class__, repr(number)  # 0.0 is not -0.0
            if key not in kept:
                both = check(self, lhs, rhs, *args, **kwargs)
                kept[key] = both[0 if right is tensor else 1]
                return both
            return (kept[key], rhs) if right is tensor else (lhs, kept[key])

        return checked

    def keep_type(cast):
        def fast(self, input, dst_ty, *args, **kwargs):
            of = input.type.scalar
            if of.__class__ is core.dtype and dst_ty.scalar.__class__ is core.dtype and of.name == dst_ty.scalar.name:
                return input
            return cast(self, input, dst_ty, *args, **kwargs)

        return fast

    def look_for_overflow(check):
        """The same in numpy: what overflows is left to triton, which says so."""
        operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

        def checked(self, lhs, rhs, binary_op):
            operation, a, b = operations.get(binary_op.__name__), lhs.handle.data, rhs.handle.data
            if operation is not None and a.dtype.kind in "iu" and a.dtype == b.dtype and a.dtype.itemsize < 8:
                wide, limits = operation(a.astype(np.int64), b.astype(np.int64)), np.iinfo(a.dtype)
                if limits.min <= wide.min() and wide.max() <= limits.max:
                    return None
            return check(self, lhs, rhs, binary_op)

        return checked

    semantic = getattr(tl.semantic, "TritonSemantic", None)  # before triton 3.4 these are functions of a module
    operands = ("self", "lhs", "rhs")
    numbers = []
    if semantic is not None:
        numbers = [
            (semantic, "binary_op_type_checking_impl", operands, keep_numbers),
            (semantic, "cast", ("self", "input", "dst_ty"), keep_type),
            (semantic, "binary_op_sanitize_overflow_impl", (*operands, "binary_op"), look_for_overflow),
        ]
    moves = [("create_addptr", "ptr"), ("create_splat", ""), ("create_broadcast", "arg"), ("create_expand_dims", "arg")]
    return [
        (interpreter.GridExecutor, "__call__", ("self", "args_dev", "kwargs"), launch),
        (interpreter, "_patch_lang", ("fn",), patch_once),
        (interpreter, "_implicit_cvt", ("arg",), remember_tensor),
        *((builder, name, ("self", arg) if arg else ("self",), keep_home) for name, arg in moves),
        (builder, "create_masked_load", ("self", "ptrs", "mask"), check("load", 0, 1)),
        (builder, "create_masked_store", ("self", "ptrs", "value", "mask"), check("store", 0, 2)),
        (builder, "create_atomic_rmw", ("self", "rmwOp", "ptr", "val", "mask"), check("atomic", 1, 3)),
        (builder, "create_atomic_cas", ("self", "ptr"), check("atomic", 0, None)),
        (builder, "cast_impl", ("self", "src", "dst_type"), exact_bf16),
        (block_type, "__init__", ("self", "element_ty", "shape"), keep_types),
        (tensor, "__init__", ("self", "handle", "type"), keep_shapes),
        (core, "_unwrap_if_constexpr", ("o",), unwrap_fast),
        (interpreter, "_get_np_dtype", ("tt_dtype",), keep_np_dtype),
        *numbers,
    ]
