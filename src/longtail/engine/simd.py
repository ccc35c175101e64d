"""Vectors, pointers and atomics for Numba kernels, which by itself has none of them.

A ``Vector`` is 64 bytes: 16 float32 or 8 float64; LLVM splits it where registers are narrower. ``gemm_tile`` and
``dot_tile`` are register-blocked micro-kernels, unrolled when the kernel is compiled. All are deterministic: the
order of additions depends on the reduced dimension alone, never on how many rows are computed together.
"""

from __future__ import annotations

import math
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

VECTOR_BYTES = 64


class Vector(types.Type):
    def __init__(self, scalar: types.Float) -> None:
        self.scalar = scalar
        self.lanes = VECTOR_BYTES * 8 // scalar.bitwidth
        super().__init__(name=f"Vector({scalar})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _ir_vector(fe_type.scalar))


def _ir_scalar(scalar: types.Float) -> ir.Type:
    return ir.FloatType() if scalar == types.float32 else ir.DoubleType()


def _ir_vector(scalar: types.Float) -> ir.VectorType:
    return ir.VectorType(_ir_scalar(scalar), VECTOR_BYTES * 8 // scalar.bitwidth)


def _constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _load(builder, pointer, vector: ir.VectorType, itemsize: int):
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = itemsize
    return loaded


def _store(builder, pointer, value, itemsize: int) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer())).align = itemsize


def _splat(builder, scalar, vector: ir.VectorType):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _call(builder, name: str, result: ir.Type, *args):
    suffix = f"v{result.count}" if isinstance(result, ir.VectorType) else ""
    element = result.element if isinstance(result, ir.VectorType) else result
    full = f"llvm.{name}.{suffix}{'f32' if isinstance(element, ir.FloatType) else 'f64'}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), full)
    return builder.call(function, args)


def _halve(builder, vector, combine):
    """Reduce a vector to a scalar by a fixed tree."""
    count = vector.type.count
    while count > 1:
        count //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        index = ir.VectorType(ir.IntType(32), count)
        low = builder.shuffle_vector(vector, undefined, ir.Constant(index, list(range(count))))
        high = builder.shuffle_vector(vector, undefined, ir.Constant(index, list(range(count, 2 * count))))
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


# Elements of arrays: index counts elements of a C-contiguous array from its start.


@intrinsic
def load(typingctx, array, index):
    scalar = array.dtype

    def codegen(context, builder, signature, args):
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return _load(builder, pointer, _ir_vector(scalar), scalar.bitwidth // 8)

    return Vector(scalar)(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, vector):
    def codegen(context, builder, signature, args):
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        _store(builder, pointer, args[2], vector.scalar.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def splat(typingctx, scalar):
    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], _ir_vector(scalar))

    return Vector(scalar)(scalar), codegen


def _binary(name: str, emit):
    @intrinsic
    def operation(typingctx, a, b):
        if a != b:
            return None

        def codegen(context, builder, signature, args):
            return emit(builder, *args)

        return a(a, b), codegen

    operation.__name__ = name
    return operation


add = _binary("add", lambda builder, a, b: builder.fadd(a, b))
sub = _binary("sub", lambda builder, a, b: builder.fsub(a, b))
mul = _binary("mul", lambda builder, a, b: builder.fmul(a, b))
div = _binary("div", lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary("maximum", lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def fma(typingctx, a, b, c):
    def codegen(context, builder, signature, args):
        return _call(builder, "fma", args[0].type, *args)

    return a(a, b, c), codegen


@intrinsic
def total(typingctx, vector):
    """Sum of the elements."""

    def codegen(context, builder, signature, args):
        return _halve(builder, args[0], builder.fadd)

    return vector.scalar(vector), codegen


@intrinsic
def largest(typingctx, vector):
    def codegen(context, builder, signature, args):
        return _halve(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return vector.scalar(vector), codegen


@intrinsic
def total64(typingctx, vector):
    """Sum of the elements in float64."""

    def codegen(context, builder, signature, args):
        wide = ir.VectorType(ir.DoubleType(), args[0].type.count)
        value = args[0] if args[0].type == wide else builder.fpext(args[0], wide)
        return _halve(builder, value, builder.fadd)

    return types.float64(vector), codegen


def _exp(builder, x):
    """exp by Cody-Waite reduction and a Taylor polynomial on |r| <= ln(2)/2.

    Relative error below 2e-7 (float32) and 4e-16 (float64); 0 below the smallest normal number, and no infinity: large
    arguments are cut to 88 (709). NaN stays NaN.
    """
    single = isinstance(x.type.element, ir.FloatType)
    bits, mantissa, bias, terms = (32, 23, 127, 7) if single else (64, 52, 1023, 13)
    lowest, highest = (-87.0, 88.0) if single else (-708.0, 709.0)
    ln2_high, ln2_low = (0.693359375, -2.12194440e-4) if single else (0.6931471803691238, 1.9082149292705877e-10)
    vector, integers = x.type, ir.VectorType(ir.IntType(bits), x.type.count)

    def constant(value: float):
        return _constant(vector, value)

    def multiply_add(a, b, c):
        return _call(builder, "fma", vector, a, b, c)

    tiny = builder.fcmp_ordered("<", x, constant(lowest))
    bounded = builder.select(tiny, constant(lowest), x)
    bounded = builder.select(builder.fcmp_ordered(">", x, constant(highest)), constant(highest), bounded)
    n = _call(builder, "floor", vector, multiply_add(bounded, constant(1 / math.log(2)), constant(0.5)))
    r = multiply_add(n, constant(-ln2_low), multiply_add(n, constant(-ln2_high), bounded))
    p = constant(1 / math.factorial(terms))
    for k in range(terms - 1, -1, -1):
        p = multiply_add(p, r, constant(1 / math.factorial(k)))
    exponent = builder.add(builder.fptosi(n, integers), ir.Constant(integers, [bias] * vector.count))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [mantissa] * vector.count)), vector)
    return builder.select(tiny, constant(0.0), builder.fmul(p, power))


@intrinsic
def exp(typingctx, vector):
    """exp of each element; see :func:`_exp` for its accuracy and range."""

    def codegen(context, builder, signature, args):
        return _exp(builder, args[0])

    return vector(vector), codegen


# Micro-kernels


def _cases(builder, first, second, shapes: list[tuple[int, int]]):
    """Position ``builder`` in one branch for each pair of values, in turn; other values do nothing."""
    end = builder.append_basic_block("end")
    key = builder.add(builder.mul(first, ir.Constant(first.type, 16)), second)
    switch = builder.switch(key, end)
    for shape in shapes:
        block = builder.append_basic_block(f"shape{shape[0]}x{shape[1]}")
        switch.add_case(ir.Constant(key.type, shape[0] * 16 + shape[1]), block)
        builder.position_at_end(block)
        yield shape
        builder.branch(end)
    builder.position_at_end(end)


TILE_ROWS = 6
TILE_VECTORS = 4


@intrinsic
def gemm_tile(
    typingctx, rows, vectors, accumulate, a, a_at, a_stride, b, b_at, b_stride, ahead, c, c_at, c_stride, depth
):
    """``c[rows, vectors] (+)= a[rows, depth] @ b[depth, vectors]`` with the tile of ``c`` in registers.

    ``rows`` is 1 to TILE_ROWS, ``vectors`` (64 bytes each) 1, 2 or TILE_VECTORS, ``depth`` even; one unrolled body is
    compiled for each shape. A single vector column takes two chains of additions (even and odd depth) to hide the
    latency of FMA. If ``ahead`` is not 0, the elements of ``b`` that far ahead are prefetched, a line with each line
    that is read: in one burst they would hold up the loads behind them.
    """
    scalar = b.dtype

    def codegen(context, builder, signature, args):
        rows, vectors, accumulate = args[:3]
        data = [_data(context, builder, signature.args[i], args[i]) for i in (3, 6, 10)]
        numbers = [args[i] for i in (4, 5, 7, 8, 9, 11, 12, 13)]
        shapes = [(r, v) for r in range(1, TILE_ROWS + 1) for v in (1, 2, TILE_VECTORS)]
        for n_rows, n_vectors in _cases(builder, rows, vectors, shapes):
            _gemm_body(builder, n_rows, n_vectors, accumulate, data, numbers, scalar)
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, types.boolean, a, i, i, b, i, i, i, c, i, i, i), codegen


def _gemm_body(builder, n_rows, n_vectors, accumulate, data, numbers, scalar) -> None:
    a_p, b_p, c_p = data
    a_at, a_stride, b_at, b_stride, ahead, c_at, c_stride, depth = numbers
    word, vector, itemsize = a_at.type, _ir_vector(scalar), scalar.bitwidth // 8
    fetches = builder.icmp_signed("!=", ahead, ir.Constant(word, 0))
    chains = 2 if n_vectors == 1 else 1

    def row(pointer, at, stride, i):
        return builder.gep(pointer, [builder.add(at, builder.mul(stride, ir.Constant(word, i)))])

    def column(pointer, j):
        return builder.gep(pointer, [ir.Constant(word, j * vector.count)])

    tile = [(i, j) for i in range(n_rows) for j in range(n_vectors)]
    acc = {(i, j, s): cgutils.alloca_once(builder, vector) for i, j in tile for s in range(chains)}
    rows_a = [row(a_p, a_at, a_stride, i) for i in range(n_rows)]
    rows_c = [row(c_p, c_at, c_stride, i) for i in range(n_rows)]
    for slot in acc.values():
        builder.store(_constant(vector, 0.0), slot)
    with builder.if_then(accumulate):
        for i, j in tile:
            builder.store(_load(builder, column(rows_c[i], j), vector, itemsize), acc[i, j, 0])
    start_b = builder.gep(b_p, [b_at])
    with cgutils.for_range(builder, builder.sdiv(depth, ir.Constant(word, 2)), intp=word) as loop:
        for s in range(2):
            k = builder.add(builder.mul(loop.index, ir.Constant(word, 2)), ir.Constant(word, s))
            row_b = builder.gep(start_b, [builder.mul(k, b_stride)])
            b_v = [_load(builder, column(row_b, j), vector, itemsize) for j in range(n_vectors)]
            with builder.if_then(fetches):
                for j in range(n_vectors):
                    _prefetch(builder, builder.gep(column(row_b, j), [ahead]))
            for i in range(n_rows):
                a_v = _splat(builder, builder.load(builder.gep(rows_a[i], [k])), vector)
                for j in range(n_vectors):
                    slot = acc[i, j, s % chains]
                    builder.store(_call(builder, "fma", vector, a_v, b_v[j], builder.load(slot)), slot)
    for i, j in tile:
        value = builder.load(acc[i, j, 0])
        if chains == 2:
            value = builder.fadd(value, builder.load(acc[i, j, 1]))
        _store(builder, column(rows_c[i], j), value, itemsize)


DOT_ROWS = 4
DOT_COLUMNS = 6


@intrinsic
def dot_tile(typingctx, rows, columns, prefetch, a, a_at, a_stride, b, b_at, b_stride, c, c_at, c_stride, depth):
    """``c[rows, columns] = a[rows, depth] @ b[columns, depth].T``, vectorised over ``depth``.

    ``rows`` is 1 to DOT_ROWS, ``columns`` 1, 2 or DOT_COLUMNS, ``depth`` a multiple of a vector. Each element is one
    chain of FMAs per lane and a fixed tree over lanes. ``prefetch`` asks for the rows of ``b`` two tiles ahead: the
    first pass over a weight matrix runs at the speed of memory only so.
    """
    scalar = b.dtype

    def codegen(context, builder, signature, args):
        rows, columns, prefetch = args[:3]
        data = [_data(context, builder, signature.args[i], args[i]) for i in (3, 6, 9)]
        numbers = [args[i] for i in (4, 5, 7, 8, 10, 11, 12)]
        shapes = [(r, n) for r in range(1, DOT_ROWS + 1) for n in (1, 2, DOT_COLUMNS)]
        for n_rows, n_columns in _cases(builder, rows, columns, shapes):
            _dot_body(builder, n_rows, n_columns, prefetch, data, numbers, scalar)
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, types.boolean, a, i, i, b, i, i, c, i, i, i), codegen


def _dot_body(builder, n_rows, n_columns, prefetch, data, numbers, scalar) -> None:
    a_p, b_p, c_p = data
    a_at, a_stride, b_at, b_stride, c_at, c_stride, depth = numbers
    word, vector, itemsize = a_at.type, _ir_vector(scalar), scalar.bitwidth // 8

    def row(pointer, at, stride, i):
        return builder.gep(pointer, [builder.add(at, builder.mul(stride, ir.Constant(word, i)))])

    tile = [(i, j) for i in range(n_rows) for j in range(n_columns)]
    acc = {at: cgutils.alloca_once(builder, vector) for at in tile}
    rows_a = [row(a_p, a_at, a_stride, i) for i in range(n_rows)]
    rows_b = [row(b_p, b_at, b_stride, j) for j in range(n_columns)]
    ahead = builder.mul(b_stride, ir.Constant(word, 2 * n_columns))
    for slot in acc.values():
        builder.store(_constant(vector, 0.0), slot)
    with cgutils.for_range(builder, builder.sdiv(depth, ir.Constant(word, vector.count)), intp=word) as loop:
        k = builder.mul(loop.index, ir.Constant(word, vector.count))
        b_v = [_load(builder, builder.gep(pointer, [k]), vector, itemsize) for pointer in rows_b]
        with builder.if_then(prefetch):
            for pointer in rows_b:
                _prefetch(builder, builder.gep(pointer, [builder.add(k, ahead)]))
        for i in range(n_rows):
            a_v = _load(builder, builder.gep(rows_a[i], [k]), vector, itemsize)
            for j in range(n_columns):
                slot = acc[i, j]
                builder.store(_call(builder, "fma", vector, a_v, b_v[j], builder.load(slot)), slot)
    sums = _reduce_all(builder, [builder.load(acc[at]) for at in tile])
    for (i, j), value in zip(tile, sums, strict=True):
        builder.store(value, builder.gep(row(c_p, c_at, c_stride, i), [ir.Constant(word, j)]))


def _prefetch(builder, pointer) -> None:
    """Into the second-level cache."""
    flag = ir.IntType(32)
    byte = cgutils.voidptr_t
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), "llvm.prefetch.p0i8"
    )
    builder.call(
        function, [builder.bitcast(pointer, byte), ir.Constant(flag, 0), ir.Constant(flag, 2), ir.Constant(flag, 1)]
    )


def _reduce_all(builder, vectors: list) -> list:
    """Sums over the elements of each vector, all by the same tree (neighbours first), sharing the shuffles."""
    kind = vectors[0].type
    lanes, results = kind.count, []
    index = ir.VectorType(ir.IntType(32), lanes)
    even = ir.Constant(index, list(range(0, 2 * lanes, 2)))
    odd = ir.Constant(index, list(range(1, 2 * lanes, 2)))
    for start in range(0, len(vectors), lanes):
        level = vectors[start : start + lanes]
        count = len(level)
        while len(level) < lanes:
            level.append(_constant(kind, 0.0))
        while len(level) > 1:
            level = [
                builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
        results += [builder.extract_element(level[0], ir.Constant(ir.IntType(32), i)) for i in range(count)]
    return results


# Memory shared by the threads of a team


@intrinsic
def as_pointer(typingctx, address):
    """A void pointer from an integer address, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def fetch_add(typingctx, array, index, value):
    """Atomic ``array[index] += value`` on int64; returns the old value."""

    def codegen(context, builder, signature, args):
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def atomic_load(typingctx, array, index):
    """``array[index]`` of int64, as another thread last wrote it."""

    def codegen(context, builder, signature, args):
        pointer = builder.gep(_data(context, builder, signature.args[0], args[0]), [args[1]])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def monotonic_ns(typingctx):
    """``CLOCK_MONOTONIC`` in nanoseconds."""

    def codegen(context, builder, signature, args):
        i32, i64 = ir.IntType(32), ir.IntType(64)
        spec = cgutils.alloca_once(builder, i64, size=2)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(i32, [i32, i64.as_pointer()]), "clock_gettime"
        )
        builder.call(function, [ir.Constant(i32, time.CLOCK_MONOTONIC), spec])
        seconds, rest = (builder.load(builder.gep(spec, [ir.Constant(i32, i)])) for i in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(i64, 10**9)), rest)

    return types.int64(), codegen
