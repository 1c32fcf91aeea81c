//! Format-aware mutations of safetensors files: most random changes invalidate the length field or the
//! offsets and never reach later checks.

use libfuzzer_sys::fuzzer_mutate;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

/// Mutates the file in place and returns its new size.
pub fn mutate(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut random = Random(u64::from(seed) | 1 << 32);
    if random.below(8) == 0 {
        return fuzzer_mutate(data, size, max_size);
    }
    let Some((json, rest)) = split(&data[..size]) else { return fuzzer_mutate(data, size, max_size) };
    let (json, rest) = (json.to_vec(), rest.to_vec());
    let (json, rest) = match serde_json::from_slice::<Map<String, Value>>(&json) {
        Ok(header) if random.below(4) > 0 => {
            let (header, rest) = change(header, rest, &mut random);
            (serde_json::to_vec(&header).unwrap_or_default(), rest)
        }
        _ if random.below(4) > 0 => (by_bytes(json, max_size), rest),
        _ => (json, by_bytes(rest, max_size)),
    };
    let file = [&(json.len() as u64).to_le_bytes()[..], &json, &rest].concat();
    if file.len() > max_size {
        return fuzzer_mutate(data, size, max_size);
    }
    data[..file.len()].copy_from_slice(&file);
    file.len()
}

fn split(file: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = file.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
}

fn by_bytes(mut bytes: Vec<u8>, max_size: usize) -> Vec<u8> {
    let size = bytes.len();
    bytes.resize((size + 64).min(max_size.max(size)), 0);
    let room = bytes.len();
    let size = fuzzer_mutate(&mut bytes, size, room);
    bytes.truncate(size);
    bytes
}

const SUFFIXES: [&str; 9] = ["", "_scale", "_zero_point", "_packed", "_shape", ".bitmask", ".values", ".shape", ".weight"];
const DTYPES: [Dtype; 10] = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F64, Dtype::I8, Dtype::U8, Dtype::I32, Dtype::I64, Dtype::F4, Dtype::BOOL];
const SIZES: [u64; 8] = [0, 1, 2, 3, 4, 8, 1 << 32, u64::MAX];

/// Mutates one tensor and, in most cases, adjusts the offsets and the data.
fn change(header: Map<String, Value>, rest: Vec<u8>, random: &mut Random) -> (Map<String, Value>, Vec<u8>) {
    let mut entries: Vec<(String, Value)> = header.into_iter().collect();
    let chosen = random.below(entries.len() + 1);
    if let Some((name, entry)) = entries.get_mut(chosen).filter(|(_, entry)| entry.is_object()) {
        let shape = entry.get("shape").and_then(Value::as_array).cloned().unwrap_or_default();
        match random.below(7) {
            0 => *name = format!("w{}", random.pick(&SUFFIXES)),
            1 => entry["dtype"] = json!(random.pick(&DTYPES)),
            2 => entry["shape"] = json!([*random.pick(&SIZES), *random.pick(&SIZES)]),
            3 => entry["shape"] = shape.iter().chain([&json!(random.pick(&SIZES))]).cloned().collect(),
            4 => entry["shape"] = shape.into_iter().skip(1).collect(),
            5 => entry["data_offsets"] = json!([random.below(64), random.below(64)]),
            _ => drop(entries.remove(chosen)),
        }
    } else if random.below(4) == 0 {
        entries.push(("__metadata__".into(), json!({ "format": "pt", "compress.sparse": "1" })));
    } else {
        let name = format!("w{}", random.pick(&SUFFIXES));
        entries.push((name, json!({ "dtype": random.pick(&DTYPES), "shape": [random.below(9), random.below(9)], "data_offsets": [0, 0] })));
    }
    let header: Map<String, Value> = entries.into_iter().collect();
    if random.below(6) == 0 { (header, rest) } else { fit(header, rest) }
}

fn fit(mut header: Map<String, Value>, mut rest: Vec<u8>) -> (Map<String, Value>, Vec<u8>) {
    let mut position = 0u64;
    for (_, entry) in header.iter_mut().filter(|(name, _)| *name != "__metadata__") {
        let Ok(dtype) = serde_json::from_value::<Dtype>(entry["dtype"].clone()) else { continue };
        let sizes = entry["shape"].as_array().into_iter().flatten();
        let bits = sizes.filter_map(Value::as_u64).fold(dtype.bitsize() as u64, u64::wrapping_mul);
        let end = position + (bits / 8).min(4096);
        entry["data_offsets"] = json!([position, end]);
        position = end;
    }
    rest.resize(position as usize, 0x55);
    (header, rest)
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}
