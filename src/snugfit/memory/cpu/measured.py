"""Operations whose CPU kernels were measured to allocate their results and nothing else (up to 300 bytes).

Measured with torch 2.13 in float32 and bfloat16, forward and backward, on inputs that lie contiguous, transposed and
expanded; those of optimizers in their for-loop, foreach and fused forms. Upsampling also makes a table of each line.
"""

WITHOUT_HIDDEN_MEMORY: frozenset[str] = frozenset(
    """
    _conj.default _ctc_loss.Tensor _foreach_add.List _foreach_add_.List _foreach_add_.Scalar _foreach_add_.Tensor
    _foreach_addcdiv_.Scalar _foreach_addcdiv_.ScalarList _foreach_addcmul_.Scalar _foreach_copy_.default
    _foreach_div.ScalarList _foreach_div_.Scalar _foreach_div_.ScalarList _foreach_div_.Tensor _foreach_lerp_.Scalar
    _foreach_maximum_.List _foreach_mul.Scalar _foreach_mul_.List _foreach_mul_.Scalar _foreach_mul_.Tensor
    _foreach_neg_.default _foreach_norm.Scalar _foreach_sqrt.default _foreach_sqrt_.default _fused_adagrad_.default
    _fused_adam_.default _fused_adamw_.default _fused_sgd_.default _linalg_check_errors.default
    _linalg_solve_ex.default _local_scalar_dense.default _pack_padded_sequence.default _pdist_backward.default
    _pdist_forward.default _prelu_kernel.default _prelu_kernel_backward.default _record_function_enter.default
    _record_function_enter_new.default _record_function_exit._RecordFunction _record_function_exit.default
    _reshape_alias.default _to_copy.default _unsafe_view.default _weight_norm_interface.default
    _weight_norm_interface_backward.default acos.default add_.Scalar all.default amax.default any.default
    arange.default arange.start arange.start_step argmax.default argmin.default as_strided.default bernoulli.default
    bernoulli_.float binary_cross_entropy_backward.default bincount.default bitwise_and_.Tensor bitwise_not.default
    cat.default ceil.default celu.default clamp.default clamp_.default clamp_max.default clamp_min.default
    clamp_min_.Tensor clamp_min_.default constant_pad_nd.default detach.default detach_.default diag_embed.default
    diagonal.default diagonal_backward.default div.out div_.Scalar dot.default elu.default elu_backward.default
    embedding.default empty.memory_format empty_like.default eq.Scalar exp_.default expand.default
    exponential_.default eye.default fill_.Scalar fill_.Tensor flip.default floor.default
    fractional_max_pool2d.default full.default full_like.default ge.Scalar gelu.default glu.default
    glu_backward.default grid_sampler_2d.default gt.Scalar hardswish.default hardswish_backward.default
    hardtanh.default hardtanh_backward.default histc.default huber_loss_backward.default index_copy.default
    index_fill.int_Scalar index_fill.int_Tensor is_same_size.default isnan.default isneginf.default le.Scalar
    leaky_relu.default leaky_relu_backward.default lerp.Scalar lerp_.Scalar lift.default lift_fresh.default
    linalg_cholesky_ex.default linalg_cross.default linalg_lu_solve.default linalg_solve_triangular.default
    linspace.default log_sigmoid_backward.default logcumsumexp.default logical_and.default logical_and_.default
    logical_not.default logical_or.default logical_or_.default lt.Scalar masked_fill.Scalar masked_fill_.Scalar
    masked_scatter.default max.dim max_unpool2d.default maximum.out median.dim min.dim mish.default
    mish_backward.default mse_loss_backward.default mul_.Scalar nan_to_num.default native_dropout.default ne.Scalar
    neg.default neg_.default new_empty.default new_empty_strided.default new_full.default new_ones.default
    new_zeros.default nll_loss_backward.default norm.ScalarOpt_dim normal_.default ones.default ones_like.default
    permute.default pow.Scalar pow.Tensor_Scalar pow_.Scalar rand.default rand_like.default randint.default
    randint.low randn.default randn_like.default randperm.default relu.default relu_.default remainder.Scalar
    repeat.default rrelu_with_noise.default rrelu_with_noise_backward.default rsqrt_.default scalar_tensor.default
    select.int select_backward.default set_.source_Tensor sgn.default sigmoid_.default sigmoid_backward.default
    sign.default silu.default silu_backward.default slice.Tensor slice_backward.default
    smooth_l1_loss_backward.default softplus.default softplus_backward.default softshrink.default
    softshrink_backward.default sqrt_.default squeeze.dim stack.default std.correction sub_.Scalar t.default
    tanh_.default tanh_backward.default threshold.default threshold_backward.default topk.default trace.default
    transpose.int transpose_.default tril.default tril_indices.default triu.default unfold.default uniform_.default
    unsafe_split.Tensor unsqueeze.default upsample_bicubic2d.default upsample_linear1d.default
    upsample_nearest1d.default upsample_nearest3d.default upsample_trilinear3d.default var.correction
    var_mean.correction vdot.default view.default view_as_complex.default view_as_real.default zero_.default
    zeros.default zeros_like.default
    """.split()
)
