//! Extends the library by a pass, an export format, a metric, a data source and a store of files.
//!
//! ```text
//! cargo run --example plugins -- examples/build_script/model OUT
//! ```
//!
//! The files of MODEL are read from memory, and its classes are compared on generated images.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use compress::plugin::{Array, DataSource, Format, Metric, Sample, Store, WeightValues};
use compress::prelude::*;
use compress::{Error, Result, plugin};

/// Scales each row of a matrix so that its largest weight is 1.
#[derive(Debug)]
struct NormalizeRows;

impl plugin::Pass for NormalizeRows {
    fn rule(&self) -> String {
        "matrices".into()
    }

    fn selects(&self, _name: &str, shape: &[usize]) -> bool {
        shape.len() == 2
    }

    fn apply(&self, _name: &str, _shape: &[usize], _row: usize, values: &mut [f32]) -> Result<()> {
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        values.iter_mut().filter(|_| largest > 0.0).for_each(|value| *value /= largest);
        Ok(())
    }
}

/// Files in memory, by name.
struct Memory(BTreeMap<String, Vec<u8>>);

impl Store for Memory {
    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>> {
        let is_inside = |name: &&String| folder.is_empty() || name.starts_with(&format!("{folder}/"));
        Ok(self.0.keys().filter(is_inside).map(|name| (name.clone(), self.0[name].len() as u64)).collect())
    }

    fn read(&self, file: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let bytes = self.0.get(file).ok_or(io::ErrorKind::NotFound)?;
        buffer.copy_from_slice(bytes.get(offset as usize..).and_then(|rest| rest.get(..buffer.len())).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Images with one bright row, whose number selects the class.
struct Stripes;

impl DataSource for Stripes {
    fn count(&self) -> usize {
        280
    }

    fn sample(&self, number: usize) -> Result<Sample> {
        let row = number % 28;
        let pixels: Vec<f32> = (0..784).map(|at| if at / 28 == row { 1.0 - number as f32 / 400.0 } else { 0.1 }).collect();
        let mut sample = Sample::new("pixels", Array::floats([784], pixels));
        sample.class = Some(row % 10);
        Ok(sample)
    }

    fn has_classes(&self) -> bool {
        true
    }
}

/// Fraction of the samples whose class is among the two most probable ones.
#[derive(Default)]
struct TopTwo {
    hits: usize,
    samples: usize,
}

impl Metric for TopTwo {
    fn add(&mut self, outputs: &BTreeMap<String, Array>, classes: Option<&[Option<usize>]>) -> Result<()> {
        let logits = outputs.values().next().and_then(|array| Some((array.as_floats()?, *array.shape().last()?)));
        let (Some((logits, count)), Some(classes)) = (logits, classes) else {
            return Err(Error::option("top-two", "needs logits and classes"));
        };
        for (row, class) in logits.chunks(count).zip(classes) {
            let Some(class) = class else { continue };
            self.hits += usize::from(row.iter().filter(|logit| **logit > row[*class]).count() < 2);
            self.samples += 1;
        }
        Ok(())
    }

    fn value(&self) -> Result<f64> {
        Ok(self.hits as f64 / self.samples.max(1) as f64)
    }
}

/// Lines with the names and lengths of the weights, an empty line, and the values as little-endian floats.
#[derive(Debug)]
struct Raw;

/// The format.
pub fn raw() -> impl Format {
    Raw
}

fn header(weights: &[WeightValues]) -> String {
    weights.iter().map(|weight| format!("{} {}\n", weight.name(), weight.elements())).collect::<String>() + "\n"
}

impl Format for Raw {
    fn file(&self) -> String {
        "weights.raw".into()
    }

    fn size(&self, weights: &[WeightValues]) -> Result<u64> {
        Ok(header(weights).len() as u64 + 4 * weights.iter().map(|weight| weight.elements() as u64).sum::<u64>())
    }

    fn write(&self, weights: &[WeightValues], file: &mut dyn Write) -> Result<()> {
        let failed = Error::io("write", Path::new("weights.raw"));
        let mut write = || -> io::Result<Result<()>> {
            file.write_all(header(weights).as_bytes())?;
            Ok(weights.iter().try_for_each(|weight| {
                weight.visit(&mut |values| {
                    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                    file.write_all(&bytes).map_err(Error::io("write", Path::new("weights.raw")))
                })
            }))
        };
        write().map_err(failed)?
    }

    fn read(&self, path: &Path, name: &str, start: usize, values: &mut [f32]) -> Result<()> {
        let read = || -> io::Result<Vec<u8>> {
            let mut file = BufReader::new(std::fs::File::open(path)?);
            let (mut before, mut found, mut line) = (0, None, String::new());
            while file.read_line(&mut line)? > 1 {
                let (other, count) = line.trim_end().rsplit_once(' ').ok_or(io::ErrorKind::InvalidData)?;
                if other == name {
                    found = Some(before);
                }
                before += count.parse::<u64>().map_err(|_| io::ErrorKind::InvalidData)?;
                line.clear();
            }
            let first = found.ok_or(io::ErrorKind::NotFound)? + start as u64;
            let header = file.stream_position()?;
            file.seek(SeekFrom::Start(header + 4 * first))?;
            let mut bytes = vec![0; 4 * values.len()];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(Error::io("read", path))?;
        for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }
}

/// Registers all of them, with the files of a folder in the store.
fn register(folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("read", folder))?.flatten() {
        let bytes = std::fs::read(entry.path()).map_err(Error::io("read", &entry.path()))?;
        files.insert(format!("net/{}", entry.file_name().to_string_lossy()), bytes);
    }
    plugin::register_store("memory", Memory(files)).map_err(Error::io("register", Path::new("memory:")))?;
    plugin::register_source("stripes", Stripes)?;
    plugin::register_metric("top-two", TopTwo::default)?;
    let no_options = |options: &serde_json::Value| if options.is_null() { Ok(()) } else { Err(Error::option("options", "there are none")) };
    plugin::register_pass("normalize-rows", move |options| no_options(options).map(|()| NormalizeRows))?;
    plugin::register_format("raw", move |options| no_options(options).map(|()| Raw))
}

const RECIPE: &str = "
model: memory:net
data: { evaluation: { source: stripes, metric: top-two } }
evaluate: { latency: false }
passes: [normalize-rows, cast: { to: bf16 }]
export: [raw]
";

/// Runs the recipe on the model in `folder`.
pub fn run(folder: &Path, output: &Path) -> Result<Report> {
    register(folder)?;
    let recipe = Recipe::parse(RECIPE, Path::new("recipe.yaml"))?;
    Pipeline::builder().recipe(&recipe).build()?.run(Model::open(&recipe.model)?, output)
}

fn main() -> Result<()> {
    let paths: Vec<_> = std::env::args_os().skip(1).collect();
    let [folder, output] = &paths[..] else { return Err(Error::option("plugins", "needs the paths MODEL OUT")) };
    let report = run(folder.as_ref(), output.as_ref())?;
    let accuracy = report.accuracy.as_ref().ok_or_else(|| Error::option("plugins", "the model was not evaluated"))?;
    println!("{}: {:?} before, {:?} after", accuracy.metric.as_deref().unwrap_or("none"), accuracy.before, accuracy.after);
    for file in &report.outputs {
        println!("{}: {} bytes, {}", file.path, file.bytes, file.verified.how);
    }
    Ok(())
}
