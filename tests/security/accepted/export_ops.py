"""Modules for export that index, sort and compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accepted.export_calls import Build, Call, Run
from torch import nn

OPS: dict[str, Build] = {}
#: Functions of one number, of two numbers, and of `torch.special`.
_UNARY = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp "
    "exp2 expm1 floor frac lgamma log log10 log1p log2 logit neg positive rad2deg reciprocal "
    "relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc isnan "
    "isinf isfinite isposinf isneginf nan_to_num i0"
)
_BINARY = (
    "add sub mul div pow fmod remainder floor_divide true_divide maximum minimum fmax fmin "
    "atan2 hypot copysign nextafter logaddexp logaddexp2 xlogy eq ne lt le gt ge heaviside "
    "isclose float_power"
)
_SPECIAL = "erfcx i0e i1 ndtr log_ndtr ndtri entr bessel_j0 xlog1py zeta"


def _ops(build: Build) -> Build:
    OPS[build.__name__] = build
    return build


def linear(run: Any, **parts: Any) -> Run:
    return Run(run, l=nn.Linear(4, 4), **parts)


@_ops
def indexed() -> Call:
    """Reading at indices, from inputs and from the file."""

    def run(m: Any, x: Any, i: Any) -> Any:
        y = m.l(x)
        return [
            y[i],
            y[:, m.columns],
            y[m.rows, m.columns],
            y[..., None, 1:3],
            y[::2],
            y.gather(1, i[:, None].expand(-1, 2)),
            y.index_select(0, i),
            y.take(i),
            y.take_along_dim(i[:, None], 1),
            y.select(1, 2),
            y.narrow(1, 1, 2),
            y[m.mask],
            y.masked_select(y > 0),
            y.masked_fill(m.mask[:, None], 0.5),
            y.diagonal(),
            torch.tril(y),
            torch.triu(y),
            y.unfold(1, 2, 1),
            y.argwhere(),
        ]

    parts = {"rows": torch.tensor([0, 3]), "columns": torch.tensor([3, -1])}
    mask = torch.tensor([True, False, True, False])
    return Call(linear(run, **parts, mask=mask), (torch.randn(4, 4), torch.tensor([0, 2, 3, 1])))


@_ops
def written() -> Call:
    """Writing at indices."""

    def run(m: Any, x: Any, i: Any) -> Any:
        y = m.l(x)
        column = i[:, None]
        z = y.clone()
        z[0] = 1
        z[:, m.columns] = 2
        z[i, i] += 1
        z[z > 1] = 0
        scattered = [
            y.scatter(1, column, 1.0),
            y.scatter(1, column, y),
            y.scatter_add(1, column, y),
            *(y.scatter_reduce(1, column, y, kind) for kind in ("amax", "mean", "prod", "sum")),
            y.index_add(0, i, y),
            y.index_copy(0, i, y),
            y.index_fill(0, i, 3.0),
            y.index_reduce(0, i, y, "amin"),
            y.index_put((i,), y, accumulate=True),
            y.masked_scatter(y > 0, y),
            y.put(i, y[0]),
            torch.slice_scatter(y, y[:2], 0, 0, 2),
            torch.select_scatter(y, y[0], 0, 1),
            torch.diagonal_scatter(y, y[0]),
        ]
        return z, scattered

    net = linear(run, columns=torch.tensor([1, -1]))
    return Call(net, (torch.randn(4, 4), torch.tensor([0, 2, 3, 1])))


@_ops
def ordered() -> Call:
    """Sorting, searching and counting."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        return [
            y.sort(stable=True),
            y.argsort(),
            y.topk(2),
            y.kthvalue(2),
            y.median(1),
            y.mode(),
            y.max(1),
            y.min(1),
            y.argmax(1),
            y.argmin(),
            y.aminmax(),
            y.nanmedian(),
            y.cummax(1),
            y.cummin(1),
            y.cumsum(1),
            y.cumprod(1),
            y.logcumsumexp(1),
            torch.unique(y),
            torch.msort(y),
            y.quantile(0.5, dim=1),
            y.nanquantile(0.5),
            torch.searchsorted(m.borders, y),
            torch.bucketize(y, m.borders),
            torch.histc(y, 5, -1, 1),
            torch.bincount(y.argmax(1)),
            torch.isin(y.argmax(1), torch.tensor([1, 2])),
            y.nonzero(),
            torch.count_nonzero(y),
            torch.unique_consecutive(y.argmax(1)),
        ]

    return Call(linear(run, borders=torch.tensor([-1.0, 0.0, 1.0])), (torch.randn(3, 4),))


@_ops
def reduced() -> Call:
    """Sums, norms and moments."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        return [
            y.sum(),
            y.sum(1, keepdim=True),
            y.mean(0),
            y.prod(1),
            y.amax(1),
            y.amin((0, 1)),
            y.var(1),
            y.std(),
            torch.var_mean(y, 1),
            torch.std_mean(y),
            y.norm(),
            y.norm(1, 1),
            y.logsumexp(1),
            y.nansum(),
            y.nanmean(),
            (y > 0).all(1),
            (y > 0).any(),
            y.trace(),
            torch.linalg.vector_norm(y, 3),
            torch.linalg.matrix_norm(y),
            y.renorm(2, 0, 1.0),
            torch.cross(y[:, :3], y[:, 1:], 1),
            y.diff(dim=1),
            torch.trapezoid(y),
            torch.gradient(y[0])[0],
            torch.dist(y, x),
            torch.addcmul(x, y, y),
        ]

    return Call(linear(run), (torch.randn(3, 4),))


@_ops
def pointwise() -> Call:
    """Functions of one and of two numbers."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        outputs = [getattr(torch, name)(y) for name in _UNARY.split()]
        outputs += [getattr(torch, name)(y, x) for name in _BINARY.split()]
        outputs += [
            getattr(torch.special, n)(*(y, x)[: 1 + (n in "xlog1py zeta")])
            for n in _SPECIAL.split()
        ]
        rounded = [torch.div(y, x, rounding_mode=mode) for mode in ("floor", "trunc")]
        mixed = [
            torch.where(y > 0, y, x),
            torch.lerp(y, x, 0.3),
            torch.lerp(y, x, x),
            y.clamp(x, y),
        ]
        mixed += [2 - y, 1 / y, 2**y, y % 2, y // 2, -y, y.clamp(min=0), torch.addcdiv(y, x, x)]
        return outputs, rounded, mixed, y.clamp_max(1), y.frexp(), torch.ldexp(y, torch.ones(4))

    return Call(linear(run), (torch.rand(3, 4),))


@_ops
def integers() -> Call:
    """Integers and booleans."""

    def run(m: Any, x: Any, i: Any) -> Any:
        flags = i > 1
        return [
            i & 3,
            i | 4,
            i ^ 1,
            ~i,
            i << 1,
            i >> 1,
            i // 2,
            i % 2,
            -i,
            i * 2,
            i + 1,
            flags & (i < 3),
            flags | (i < 3),
            ~flags,
            flags ^ flags,
            flags.logical_not(),
            flags.logical_and(flags),
            flags.logical_or(flags),
            flags.logical_xor(flags),
            i.float(),
            i.to(torch.int8),
            flags.long(),
            i.double(),
            x.half(),
            x.int(),
            i.bool(),
            F.one_hot(i, 4),
            torch.gcd(i, i),
            torch.lcm(i, i),
            i.sum(),
            i.prod(),
            i.cumsum(0),
            flags.sum(),
            m.table[i],
            torch.bitwise_not(i),
            i.clamp(0, 2),
            i.abs(),
            i.sign(),
            x.type_as(i),
            x.view(torch.int32),
            torch.bitwise_left_shift(i, i),
        ]

    net = Run(run, table=torch.arange(8, dtype=torch.uint8))
    return Call(net, (torch.randn(3), torch.tensor([0, 2, 3])))


@_ops
def shaped() -> Call:
    """Tensors that are moved, joined, split and created."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        moved = [
            y.t(),
            y.permute(1, 0),
            y.transpose(0, 1),
            y.movedim(0, 1),
            y.mT,
            y.flatten(),
            y.T,
            y.view(-1),
            y.reshape(2, 2, 3),
            y.unsqueeze(0).squeeze(0),
            y.expand(2, 3, 4),
            y.flip(1),
            y.roll(1, 0),
            y.rot90(),
            y.repeat(2, 1),
            y.tile((1, 2)),
            y.repeat_interleave(2, 1),
            y.unflatten(1, (2, 2)),
            y.contiguous(),
            y.clone(),
            y.view_as(x),
            y.expand_as(x),
            y.swapaxes(0, 1),
            y.fliplr(),
            y.ravel(),
            y.broadcast_to(2, 3, 4),
            y.diag_embed(),
            y.squeeze(),
            torch.atleast_3d(y),
            y.repeat_interleave(torch.tensor([1, 2, 0]), 0),
            y.to(memory_format=torch.preserve_format),
            y[None].to(memory_format=torch.contiguous_format),
            torch.as_strided(y.contiguous(), (2, 2), (1, 2)),
        ]
        parts = [*y.split(2, 1), *y.chunk(3), *y.unbind(), *y.split([1, 3], 1), *y.tensor_split(2)]
        joined = [
            torch.cat([y, x]),
            torch.stack([y, x]),
            torch.hstack([y, x]),
            torch.vstack([y, x]),
        ]
        joined += [torch.block_diag(y, x), torch.cartesian_prod(y[0], y[1]), torch.dstack([y, x])]
        joined += torch.meshgrid(y[0], y[1], indexing="ij")
        created = [
            torch.arange(4),
            torch.arange(0, 1, 0.25),
            torch.linspace(0, 1, 3),
            torch.eye(3),
            torch.zeros(2),
            torch.ones(2),
            torch.full((2,), 3.0),
            torch.zeros_like(y),
            torch.ones_like(y),
            torch.full_like(y, 2),
            y.new_zeros(2),
            y.new_full((2,), 1),
            torch.tril_indices(3, 3),
            torch.triu_indices(3, 3),
            torch.logspace(0, 1, 3),
            torch.tensor([1.0, 2.0]),
            torch.hann_window(4),
            torch.scalar_tensor(2),
            y.new_ones(1),
            torch.vander(y[0]),
            torch.hamming_window(4),
        ]
        return moved, parts, joined, created

    return Call(linear(run), (torch.randn(3, 4),))


@_ops
def solved() -> Call:
    """Linear algebra."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        positive = y @ y.T + torch.eye(4)
        factor = torch.linalg.cholesky(positive)
        return [
            torch.linalg.inv(positive),
            torch.linalg.det(positive),
            torch.linalg.slogdet(positive),
            torch.linalg.eigvalsh(positive),
            torch.linalg.solve(positive, y),
            factor,
            torch.linalg.qr(y)[1].abs(),
            torch.linalg.svdvals(y),
            torch.linalg.matrix_exp(y),
            torch.linalg.solve_triangular(factor, y, upper=False),
            torch.linalg.pinv(positive),
            torch.cholesky_inverse(factor),
            torch.cholesky_solve(y, factor),
            torch.linalg.matrix_power(y, 3),
            torch.linalg.multi_dot([y, y, y]),
            torch.logdet(positive),
            torch.linalg.matrix_rank(positive),
        ]

    return Call(linear(run), (torch.randn(4, 4),))


@_ops
def spectra() -> Call:
    """Fourier transforms and complex numbers."""

    def run(m: Any, x: Any) -> Any:
        y = m.l(x)
        complex_ = torch.fft.rfft(y)
        signal = torch.complex(y, x)
        return [
            torch.fft.irfft(complex_),
            torch.fft.fft(y).abs(),
            torch.fft.ifft(signal).real,
            torch.fft.fft2(y).imag,
            torch.view_as_real(complex_),
            torch.view_as_complex(y.view(3, 2, 2)),
            signal.conj(),
            signal.angle(),
            signal * signal,
            torch.fft.fftshift(y),
            torch.fft.rfftn(y),
            signal.abs(),
            torch.polar(y.abs(), x),
            torch.fft.fftfreq(4),
            torch.fft.irfftn(complex_),
            signal.exp(),
        ]

    return Call(linear(run), (torch.randn(3, 4),))


@_ops
def sounds() -> Call:
    """Spectrograms."""

    def run(m: Any, x: Any) -> Any:
        spectrum = torch.stft(x, 16, 8, window=m.window, return_complex=True)
        return m.l(spectrum.abs().transpose(1, 2)), torch.istft(spectrum, 16, 8, window=m.window)

    return Call(Run(run, l=nn.Linear(9, 4), window=torch.hann_window(16)), (torch.randn(2, 64),))
