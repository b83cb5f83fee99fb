"""PyTorch op types of each op kind, by which ops are classed as safe or unsafe in 16 bits.

The contractions are those that torch's own autocast runs in 16 bits on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: Kind → op types of other names, separated by spaces.
_TYPES = {
    "matmul": (
        "linear matmul mm bmm addmm addbmm baddbmm mv addmv dot linalg_vecdot "
        "linalg_multi_dot chain_matmul tensordot bilinear"
    ),
    "conv": "conv1d conv2d conv3d convolution _convolution conv_tbc",
    "conv_transpose": "conv_transpose1d conv_transpose2d conv_transpose3d",
    "attention": (
        "scaled_dot_product_attention _native_multi_head_attention "
        "_scaled_dot_product_flash_attention_for_cpu _transformer_encoder_layer_fwd"
    ),
    "recurrent": (
        "mkldnn_rnn_layer lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
    ),
    "add": "add addcmul addcdiv",
    "sub": "sub rsub",
    "div": "div true_divide floor_divide",
    "avg_pool": (
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d lp_pool2d"
    ),
    "batch_norm": (
        "batch_norm _native_batch_norm_legit_no_training native_batch_norm "
        "_batch_norm_no_update cudnn_batch_norm"
    ),
    "group_norm": "group_norm native_group_norm",
    "layer_norm": "layer_norm native_layer_norm",
    "rms_norm": "rms_norm _fused_rms_norm",
    "leaky_relu": "leaky_relu rrelu threshold",
    "prelu": "prelu _prelu_kernel",
    "sigmoid": "sigmoid log_sigmoid log_sigmoid_forward",
    "silu": "silu glu",
    "hard_sigmoid": "hardsigmoid",
    "hard_swish": "hardswish",
    "erf": "erf erfc",
    "log": "log log2 log10",
    "softmax": "softmax _softmax _safe_softmax",
    "log_softmax": "log_softmax _log_softmax",
    "variance": "var var_mean std std_mean",
    "exp": "exp exp2",
    "pow": "pow float_power",
    "l2_norm": "norm linalg_vector_norm linalg_matrix_norm cosine_similarity renorm",
    "logsumexp": "logsumexp logaddexp",
    "cross_entropy": "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d",
    "cumsum": "cumsum logcumsumexp",
    "floor": "floor trunc",
    "sign": "sign sgn",
    "clip": "clamp clamp_min clamp_max clip hardtanh relu6",
    "concat": "cat concat concatenate",
    "stack": "stack hstack vstack",
    "split": "split split_with_sizes chunk tensor_split",
    "unstack": "unbind getitem",
    "slice": "slice select narrow diagonal unfold as_strided",
    "gather": "gather index_select index embedding take take_along_dim",
    "tile": "tile repeat repeat_interleave",
    "pad": (
        "constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d"
    ),
    "broadcast": "expand expand_as broadcast_to broadcast_tensors",
    "identity": "clone contiguous alias detach dropout lift_fresh_copy",
    "reshape": ("reshape view _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as"),
    "transpose": "permute transpose t movedim swapaxes numpy_T",
    "reverse": "flip roll rot90",
    "where": "where masked_fill index_put slice_scatter select_scatter copy",
    "triangle": "tril triu",
    "max_pool": (
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d"
    ),
    "maximum": "maximum fmax",
    "minimum": "minimum fmin",
    "max": "max amax topk sort",
    "min": "min amin",
    "resize_nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    "resize_bilinear": (
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d _upsample_bilinear2d_aa "
        "upsample_bicubic2d"
    ),
    "space_to_depth": "pixel_unshuffle im2col",
    "depth_to_space": "pixel_shuffle channel_shuffle col2im",
}
#: Kinds whose op type has the same name.
_SAME_NAMES = (
    "einsum mul instance_norm elu celu selu tanh softplus softsign gelu mish log1p sqrt "
    "rsqrt square reciprocal prod mean sum expm1 cumprod sinh cosh tan asin acos erfinv abs "
    "ceil round neg relu"
)
#: Kind (see `neural_mp.amp.KINDS`) → op types in captured graphs.
TYPES: Mapping[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in _SAME_NAMES.split()},
    **{kind: tuple(names.split()) for kind, names in _TYPES.items()},
}


def every_op_type() -> frozenset[str]:
    """Return all op types registered with torch's dispatcher, and `getitem`."""
    names = torch._C._dispatch_get_all_op_names()
    return frozenset({"getitem", *(name.split("::")[-1].split(".")[0] for name in names)})
