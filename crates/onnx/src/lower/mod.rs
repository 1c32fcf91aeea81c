//! Lowering of ops to ONNX operators, one function per op.
//!
//! The operators form the patterns that runtimes recognize and fuse, with standard ONNX operators only.
//! The fused operators of ONNX Runtime were measured against these patterns in version 1.31 on a CPU.
//! None was faster beyond noise at relevant sizes:
//!
//! | fused operator | time of the model relative to the pattern |
//! | --- | --- |
//! | `MultiHeadAttention`, BERT, 16 × 64, 4 × 256, 2 × 512 tokens | 1.05, 0.94, 0.98 |
//! | `RotaryEmbedding`, and with `MultiHeadAttention`, Llama, 16 × 128 tokens | 0.97, 0.98 |
//! | `SkipLayerNormalization`, BERT, 16 × 64 tokens | 1.13 |
//! | `MatMulNBits` with int8 activations, one layer, 1024 tokens | 2.4 to 2.8 |
//!
//! ONNX Runtime itself fuses `DequantizeLinear` and a matrix product to `MatMulNBits` with int8
//! activations: `docs/onnx.md` has the times of both.

mod activation;
mod arithmetic;
mod attention;
mod delta;
mod detection;
mod experts;
mod image;
mod integer;
mod kv_cache;
mod layer;
mod multimodal;
mod norm;
mod opaque;
pub(super) mod palette;
mod recurrent;
mod rotary;
mod sequence;
mod shape;

use super::lowering::Lowering;
use super::proto::{AttributeProto, DataType};
use crate::error::Result;
use crate::ir::Op;

/// Writes the operators of the current node.
pub(super) fn lower(op: &Op, n: &mut Lowering) -> Result<()> {
    match op {
        Op::Linear(op) => layer::linear(op, n),
        Op::Conv(op) => layer::conv(op, n),
        Op::CausalConv(_) => layer::causal_conv(n),
        Op::BatchNorm(op) => norm::batch_norm(op, n),
        Op::LayerNorm(op) => norm::layer_norm(op, n),
        Op::RmsNorm(op) => norm::rms_norm(op, n),
        Op::Normalize(op) => norm::normalize(op, n),
        Op::Relu(_) => activation::plain("Relu", n),
        Op::Sigmoid(_) => activation::plain("Sigmoid", n),
        Op::Tanh(_) => activation::plain("Tanh", n),
        Op::Gelu(op) => activation::gelu(op, n),
        Op::Silu(_) => activation::silu(n),
        Op::Clip(op) => activation::clip(op, n),
        Op::Softmax(op) => activation::softmax(op, n),
        Op::FakeQuantize(op) => integer::fake_quantize(op, n),
        Op::LearnedFakeQuantize(op) => integer::learned_fake_quantize(op, n),
        Op::CacheQuantize(op) => integer::cache_quantize(*op, n),
        // As a `Sum`, which ONNX Runtime 1.31 does not fuse with the layer normalization: the fused kernel
        // takes 4 to 6 times as long as both nodes (16 × 64 × 768 floats, one thread).
        Op::Add(_) if n.feeds_layer_norm() => layer::binary("Sum", n),
        Op::Add(_) => layer::binary("Add", n),
        Op::Mul(_) => layer::binary("Mul", n),
        Op::Embedding(_) => sequence::embedding(n),
        Op::Positions(op) => sequence::positions(op, n),
        Op::Rotary(op) => rotary::rotary(op, n),
        Op::GridRotary(op) => rotary::grid_rotary(op, n),
        Op::ImageRotary(op) => multimodal::image_rotary(op, n),
        Op::InsertImages(op) => multimodal::insert_images(op, n),
        Op::PositionScale(op) => rotary::position_scale(op, n),
        Op::SplitHeads(op) => attention::split_heads(op, n),
        Op::MergeHeads(_) => attention::merge_heads(n),
        Op::Attention(op) => attention::attention(op, n),
        Op::Route(op) => experts::route(op, n),
        Op::Dispatch(op) => experts::dispatch(op, n),
        Op::Combine(op) => experts::combine(*op, n),
        Op::MaxPool(op) => image::max_pool(op, n),
        Op::GlobalAveragePool(op) => image::global_average_pool(op, n),
        Op::Flatten(op) => image::flatten(op, n),
        Op::Patchify(_) => image::tokens(n),
        Op::Prepend(_) => sequence::prepend(n),
        Op::Select(op) => sequence::select(op, n),
        Op::Slice(op) => shape::slice(op, n),
        Op::MaskedMean(_) => sequence::masked_mean(n),
        Op::TokenPool(op) => sequence::token_pool(op, n),
        Op::RelativeBias(op) => attention::relative_bias(op, n),
        Op::RelativeProducts(op) => attention::relative_products(op, n),
        Op::WindowBias(op) => attention::window_bias(op, n),
        Op::ChunkBias(op) => attention::chunk_bias(*op, n),
        Op::Reshape(op) => shape::reshape(op, n),
        Op::Transpose(op) => shape::transpose(op, n),
        Op::Concat(op) => shape::concat(op, n),
        Op::MatMul(_) => layer::binary("MatMul", n),
        Op::Binary(op) => arithmetic::binary(op, n),
        Op::Reduce(op) => arithmetic::reduce(op, n),
        Op::CumSum(op) => arithmetic::cum_sum(op, n),
        Op::Recurrent(op) => recurrent::recurrent(op, n),
        Op::Decay(op) => delta::decay(op, n),
        Op::GatedDelta(op) => delta::gated_delta(op, n),
        Op::DeformableAttention(op) => detection::deformable_attention(op, n),
        Op::GridPositions(op) => detection::grid_positions(op, n),
        Op::Anchors(op) => detection::anchors(op, n),
        Op::TopK(op) => detection::top_k(*op, n),
        Op::GatherTokens(_) => detection::gather_tokens(n),
        Op::Detach(_) => activation::plain("Identity", n),
        Op::ConvTranspose(op) => layer::conv_transpose(op, n),
        Op::Pad(op) => shape::pad(op, n),
        Op::Resize(op) => image::resize(op, n),
        Op::AveragePool(op) => image::average_pool(op, n),
        Op::HardSigmoid(op) => arithmetic::function("HardSigmoid", &[("alpha", op.alpha), ("beta", op.beta)], n),
        Op::LeakyRelu(op) => arithmetic::function("LeakyRelu", &[("alpha", op.alpha)], n),
        Op::Elu(op) => arithmetic::function("Elu", &[("alpha", op.alpha)], n),
        Op::Power(op) => arithmetic::power(op.exponent, n),
        Op::Scale(op) => arithmetic::scale(op.factor, n),
        Op::Mish(_) => arithmetic::mish(n),
        Op::ToFloat(_) => {
            let to = if n.half { DataType::Float16 } else { DataType::Float };
            n.finish("Cast", &[&n.input(0)], vec![AttributeProto::int("to", to as i64)]);
            Ok(())
        }
        Op::Opaque(op) => opaque::opaque(op, n),
        // ONNX has operators with the same names.
        Op::Abs(_)
        | Op::Cos(_)
        | Op::Erf(_)
        | Op::Exp(_)
        | Op::HardSwish(_)
        | Op::Log(_)
        | Op::Neg(_)
        | Op::Reciprocal(_)
        | Op::Sin(_)
        | Op::Softplus(_)
        | Op::Sqrt(_) => activation::plain(op.name(), n),
    }
}
