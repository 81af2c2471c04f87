"""The ATen operators that a program file may name in a region of torch operators.

Each operator computes new tensors, or views of its arguments, and does nothing else: it writes no argument, no file and
no state, and draws no random numbers. Its kernels check indices and sizes, or
`frontends/torch/capture/torch_guards.py` does; `tests/fallback/operatorfuzz/sweep.py` searches for counterexamples.

These are left out on purpose: operators whose names begin with `_unsafe`; `as_strided` and `empty`, which give access
to unwritten memory; `from_file`; random numbers; storage, device and sparse internals; and operators that do not check
their indices or pivots (`unfold_backward`, `lu_unpack`, `linalg_ldl_solve`).
"""

from __future__ import annotations

_POINTWISE = """
abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clone complex conj _conj conj_physical
copysign cos cosh deg2rad digamma div eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod
frac frexp ge gt heaviside hypot i0 igamma igammac imag isfinite isinf isnan isneginf isposinf ldexp le lerp lgamma log
log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum
minimum mul mvlgamma nan_to_num ne neg nextafter polar polygamma positive pow rad2deg real reciprocal remainder
resolve_conj resolve_neg round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub tan tanh _to_copy trunc
view_as_complex view_as_real where xlogy
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_entr special_erfcx special_hermite_polynomial_h special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_xlog1py
special_zeta
"""

_ACTIVATIONS = """
celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward _log_softmax log_softmax mish prelu
_prelu_kernel relu relu6 selu silu softmax _softmax softplus softshrink threshold
"""

_REDUCTIONS = """
all amax amin aminmax any argmax argmin argsort bucketize cdist _cdist_forward count_nonzero cummax cummin cumprod
cumsum diff dist kthvalue linalg_vector_norm logcumsumexp logsumexp max mean median min mode msort nanmean nanmedian
nansum nanquantile norm prod quantile renorm searchsorted sort std std_mean sum topk trace trapezoid var var_mean
"""

_SHAPES = """
alias cat chunk constant_pad_nd contiguous detach diag_embed diagonal diagonal_copy diagonal_scatter expand expand_copy
flatten flip fliplr flipud gather hstack index index_add index_copy index_fill index_put index_select masked_scatter
meshgrid movedim narrow pad permute permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d
reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d reshape roll rot90 scatter scatter_add
scatter_reduce select select_scatter slice slice_scatter split split_with_sizes squeeze stack swapaxes t take
take_along_dim tensor_split tile transpose tril triu unbind unflatten unfold unsqueeze _unsafe_view
vander view view_copy vstack
"""

_CONSTANTS = """
arange bartlett_window blackman_window eye full full_like hamming_window hann_window kaiser_window lift_fresh_copy
linspace logspace new_full new_ones new_zeros ones ones_like scalar_tensor tril_indices triu_indices zeros zeros_like
"""

_LINEAR_ALGEBRA = """
addbmm addmm addmv addr baddbmm bmm cholesky cholesky_inverse cholesky_solve cov corrcoef cross det dot ger
inverse kron linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross linalg_det _linalg_det linalg_diagonal
linalg_eig linalg_eigh _linalg_eigh linalg_eigvals _linalg_eigvals linalg_eigvalsh linalg_householder_product
linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_lstsq linalg_lu
linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_norm linalg_matrix_power
linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet _linalg_slogdet linalg_solve
linalg_solve_ex _linalg_solve_ex linalg_solve_triangular linalg_svd _linalg_svd linalg_svdvals linalg_tensorinv
linalg_tensorsolve linalg_vander linalg_vecdot linear logdet matmul matrix_exp matrix_power mm mv orgqr
ormqr outer pinverse qr slogdet svd tensordot triangular_solve vdot
"""

_SIGNALS = """
_fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft
fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
fft_rfftfreq fft_rfftn istft stft
"""

_LAYERS = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d
bilinear channel_shuffle col2im conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
cosine_similarity embedding grid_sampler_2d grid_sampler_3d group_norm im2col layer_norm
max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices native_group_norm native_layer_norm
_native_batch_norm_legit_no_training one_hot pairwise_distance pdist rms_norm
_trilinear upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
"""

SAFE_OPERATORS = frozenset(
    name
    for group in (
        _POINTWISE, _ACTIVATIONS, _REDUCTIONS, _SHAPES, _CONSTANTS, _LINEAR_ALGEBRA, _SIGNALS, _LAYERS,
    )
    for name in group.split()
)  # fmt: skip
"""Names without their overloads."""
