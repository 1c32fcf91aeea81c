//! TensorBoard event files: TFRecord records, each an `Event` with the scalars of a step.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use prost::Message;

use super::Log;
use crate::error::{Error, Result};
use crate::train::records::{Evaluation, StepRecord};

/// `Event` of `tensorflow/core/util/event.proto`, with the fields used here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

/// `Summary` of `summary.proto`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

/// `Summary.Value`.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// Version in the first record of every file. Readers of this version discard steps only after a session
/// restart.
const VERSION: &str = "brain.Event:2";

/// An open event file.
pub(super) struct Events {
    path: PathBuf,
    file: File,
    prefix: String,
}

impl Events {
    /// Creates the file; after a resume at `step` > 0, keeps its events up to that step.
    pub fn open(path: PathBuf, pass: &str, step: u64) -> Result<Events> {
        let kept = if step > 0 { events_until(&path, step) } else { Vec::new() };
        let file = File::create(&path).map_err(Error::io("write", &path))?;
        let mut events = Events { path, file, prefix: pass.to_owned() };
        if kept.is_empty() {
            events.write(&Event { wall_time: now(), file_version: Some(VERSION.into()), ..Event::default() })?;
        }
        kept.iter().try_for_each(|event| events.write(event))?;
        Ok(events)
    }

    fn write(&mut self, event: &Event) -> Result<()> {
        self.file.write_all(&record(&event.encode_to_vec())).map_err(Error::io("write", &self.path))
    }

    fn scalars<'s>(&mut self, step: u64, scalars: impl Iterator<Item = (&'s str, f64)>) -> Result<()> {
        let value = scalars.map(|(name, value)| Value { tag: format!("{}/{name}", self.prefix), simple_value: Some(value as f32) }).collect();
        self.write(&Event { wall_time: now(), step: i64::try_from(step).unwrap_or(i64::MAX), file_version: None, summary: Some(Summary { value }) })
    }
}

impl Log for Events {
    fn add(&mut self, row: &StepRecord) -> Result<()> {
        let losses: Vec<(String, f64)> = row.losses.iter().map(|(name, loss)| (format!("loss/{name}"), *loss)).collect();
        let norm = row.gradient_norm.map(|norm| ("gradient_norm", norm));
        let scalars = [("loss", row.loss), ("epoch", row.epoch as f64), ("learning_rate", row.learning_rate)];
        let speed = [("samples_per_second", row.samples_per_second), ("waited", row.waited)];
        let losses = losses.iter().map(|(name, loss)| (name.as_str(), *loss));
        self.scalars(row.step, scalars.into_iter().chain(losses).chain(norm).chain(speed))
    }

    fn score(&mut self, evaluation: &Evaluation) -> Result<()> {
        self.scalars(evaluation.step, [(format!("evaluation/{}", evaluation.metric).as_str(), evaluation.value)].into_iter())
    }
}

/// Reads the events up to a step; stops at the first damaged record.
fn events_until(path: &Path, step: u64) -> Vec<Event> {
    let bytes = std::fs::read(path).unwrap_or_default();
    let mut rest = bytes.as_slice();
    let mut events = Vec::new();
    while let Some((data, remaining)) = split_record(rest) {
        let Ok(event) = Event::decode(data) else { break };
        if u64::try_from(event.step).is_ok_and(|event_step| event_step <= step) {
            events.push(event);
        }
        rest = remaining;
    }
    events
}

/// Splits off the data of the first record; `None` if it is incomplete or a checksum does not match.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(12)?;
    let (length, check) = head.split_at(8);
    let length_of = u64::from_le_bytes(length.try_into().ok()?);
    let (data, rest) = rest.split_at_checked(usize::try_from(length_of).ok()?)?;
    let (data_check, rest) = rest.split_at_checked(4)?;
    (check == masked(length) && data_check == masked(data)).then_some((data, rest))
}

/// Encodes a record: length, checksum of the length, data, checksum of the data.
fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length, masked(&length).as_slice(), data, &masked(data)].concat()
}

/// Masked CRC-32C of the TFRecord format: rotated and offset, so that checksums of data that contains
/// checksums stay robust.
fn masked(data: &[u8]) -> [u8; 4] {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C with the reflected Castagnoli polynomial (RFC 3720, appendix B.4).
fn crc32c(data: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
    !data.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn checksums_match_the_rfc() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_equal_those_of_tensorboard() {
        // `RecordWriter` of tensorboard 2.21 for Event(wall_time=1.5, step=2,
        // summary=Summary(value=[Value(tag="a/loss", simple_value=0.5)])).
        let golden = "1c00000000000000c8c1951d09000000000000f83f10022a0f0a0d0a06612f6c6f7373150000003f9bd3d8d0";
        let event = Event {
            wall_time: 1.5,
            step: 2,
            file_version: None,
            summary: Some(Summary { value: vec![Value { tag: "a/loss".into(), simple_value: Some(0.5) }] }),
        };
        let golden: Vec<u8> = (0..golden.len()).step_by(2).map(|at| u8::from_str_radix(&golden[at..at + 2], 16).unwrap()).collect();
        assert_eq!(record(&event.encode_to_vec()), golden);
        assert_eq!(split_record(&golden).map(|(data, rest)| (Event::decode(data).unwrap(), rest.len())), Some((event, 0)));
        for at in 0..golden.len() {
            let mut damaged = golden.clone();
            damaged[at] ^= 1;
            assert_eq!(split_record(&damaged), None, "byte {at}");
        }
    }

    #[test]
    fn each_step_is_recorded_once_after_a_resume() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("training.tfevents");
        let open = |step| Events::open(path.clone(), "distill", step).unwrap();
        let steps = || events_until(&path, u64::MAX).iter().filter(|event| event.summary.is_some()).map(|event| event.step).collect::<Vec<_>>();
        let mut events = open(0);
        for step in 1..=4 {
            events.add(&row(step, &[("soft", 0.5)])).unwrap();
        }
        events.score(&Evaluation { step: 4, metric: "accuracy".into(), value: 0.75 }).unwrap();
        drop(events);
        // A killed process leaves an incomplete record.
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        let mut events = open(2);
        assert_eq!(steps(), [1, 2]);
        events.add(&row(3, &[])).unwrap();
        assert_eq!(steps(), [1, 2, 3]);
        let all = events_until(&path, 9);
        assert_eq!(all.iter().filter(|event| event.file_version.as_deref() == Some(VERSION)).count(), 1);
        let tags: Vec<&str> = all[2].summary.iter().flat_map(|summary| &summary.value).map(|value| value.tag.as_str()).collect();
        assert_eq!(tags, ["distill/loss", "distill/epoch", "distill/learning_rate", "distill/loss/soft", "distill/samples_per_second", "distill/waited"]);
        let mut wrong = std::fs::read(&path).unwrap();
        wrong[40] ^= 1;
        std::fs::write(&path, wrong).unwrap();
        assert!(steps().len() < 3);
    }
}
