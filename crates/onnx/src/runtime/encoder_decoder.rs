//! Encoder-decoder models in three files, with the names of optimum: the encoder, the decoder of the first
//! tokens, and the decoder of later tokens, which has a KV cache as inputs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::{Options, Session};
use crate::error::{Error, Result};
use crate::files;
use crate::ir::Port;
use crate::ir::decoder::{DECODER_TOKENS, ENCODED, ENCODER_MASK, ENCODER_STATES, LOGITS, MASK, TOKENS, predecessor};

/// Name of the file of an encoder whose decoder is in [`DECODERS`], as in optimum.
pub const ENCODER: &str = "encoder_model.onnx";
/// Names of the files of a decoder after an encoder: for the first tokens, and for later ones.
pub const DECODERS: [&str; 2] = ["decoder_model.onnx", "decoder_with_past_model.onnx"];

/// The files of an encoder-decoder model with caches: the encoder and both decoders. `path` is their folder
/// or the file of the encoder. `None` if one of them is missing.
pub fn encoder_decoder(path: &Path) -> Option<[PathBuf; 3]> {
    let folder = if files::is_dir(path) { path } else { path.parent().filter(|_| path.ends_with(ENCODER))? };
    let found = [ENCODER, DECODERS[0], DECODERS[1]].map(|name| folder.join(name));
    found.iter().all(|file| files::is_file(file)).then_some(found)
}

/// The sessions of an encoder-decoder model.
#[derive(Debug)]
pub struct EncoderDecoderSession {
    /// The encoder, the decoder of the first tokens, and that of later ones.
    sessions: [Session; 3],
}

impl EncoderDecoderSession {
    /// Opens the files in a folder, which may be named by the file of the encoder; `None` if they are not
    /// there.
    pub fn open(path: &Path, options: Options) -> Result<Option<EncoderDecoderSession>> {
        let Some([encoder, first, next]) = encoder_decoder(path) else { return Ok(None) };
        let open = |path: &Path| Session::open(path, options);
        Ok(Some(EncoderDecoderSession { sessions: [open(&encoder)?, open(&first)?, open(&next)?] }))
    }

    /// Changes all sessions.
    #[must_use]
    pub fn map(self, change: impl FnMut(Session) -> Session) -> EncoderDecoderSession {
        EncoderDecoderSession { sessions: self.sessions.map(change) }
    }

    /// All sessions.
    pub fn sessions_mut(&mut self) -> &mut [Session] {
        &mut self.sessions
    }

    /// Total size of the files in bytes.
    pub fn bytes(&self) -> u64 {
        self.sessions.iter().map(Session::bytes).fold(0, u64::saturating_add)
    }

    /// Inputs and outputs of the whole model: the inputs of the encoder, `decoder_input_ids`, and the logits.
    pub fn ports(&self) -> (Vec<Port>, Vec<Port>) {
        let [encoder, first, _] = &self.sessions;
        let (mut inputs, (tokens, outputs)) = (encoder.ports().0, first.ports());
        inputs.extend(tokens.into_iter().filter(|port| port.name == TOKENS).map(|port| Port { name: DECODER_TOKENS.to_owned(), ..port }));
        (inputs, outputs.into_iter().filter(|port| port.name == LOGITS).collect())
    }

    /// Computes the logits of all decoder tokens, `[batch, sequence, vocabulary]`. The last `steps`
    /// tokens are processed one at a time with cached keys and values, the tokens before them at once.
    /// Fails if an input is missing, or a file does not return an output that the others need.
    pub fn run(&mut self, inputs: &BTreeMap<String, Tensor>, steps: usize) -> Result<BTreeMap<String, Tensor>> {
        let missing = |name: &str| Error::option("input", format!("`{name}` is missing; encoder-decoder models require it"));
        let lacks = |name: &str| Error::option("ONNX Runtime", format!("the files of the encoder-decoder model have no output `{name}`"));
        let [encoder, first, next] = &mut self.sessions;
        let tokens = inputs.get(DECODER_TOKENS).ok_or_else(|| missing(DECODER_TOKENS))?;
        let length = tokens.dim(1).map_err(computed)?;
        let encoded = encoder.run(inputs)?.remove(ENCODED).ok_or_else(|| lacks(ENCODED))?;
        let mut given: BTreeMap<String, Tensor> = [(ENCODER_STATES.to_owned(), encoded)].into();
        given.extend(inputs.get(MASK).map(|mask| (ENCODER_MASK.to_owned(), mask.clone())));
        let prompt = length.saturating_sub(steps).max(1).min(length);
        let mut logits = Vec::new();
        for (from, to) in [(0, prompt)].into_iter().chain((prompt..length).map(|at| (at, at.saturating_add(1)))) {
            let columns = tokens.narrow(1, from, to.saturating_sub(from)).and_then(|columns| columns.contiguous()).map_err(computed)?;
            given.insert(TOKENS.to_owned(), columns);
            let mut outputs = if from == 0 { &mut *first } else { &mut *next }.run(&given)?;
            logits.push(outputs.remove(LOGITS).ok_or_else(|| lacks(LOGITS))?);
            // Keys and values of cross-attention are only returned by the first step.
            given.extend(outputs.into_iter().filter_map(|(name, tensor)| Some((predecessor(&name)?, tensor))));
        }
        Ok([(LOGITS.to_owned(), Tensor::cat(&logits, 1).map_err(computed)?)].into())
    }
}

fn computed(e: candle_core::Error) -> Error {
    Error::candle("an encoder-decoder model with a cache", e)
}
