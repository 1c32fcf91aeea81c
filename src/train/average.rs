//! Averages of parameters over the steps of a run (Polyak & Juditsky 1992), with weights that fall exponentially.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::checkpoint::Stream;
use super::floats::{self, CHUNK};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{Home, Kept};
use crate::ir::ops::on_host;
use crate::kernel::update;

/// Where the state holds the number of steps; no parameter has this name, because those come behind a slash.
const STEPS: &str = "averaged";
const PART: &str = "average/";

/// `average = d · average + (1 - d) · parameter`, where `d` is the smaller of the decay and `(1 + t) / (10 + t)` in step `t`, counted
/// from 1: at first it follows quickly.
pub struct Average {
    decay: f64,
    steps: u64,
    averages: BTreeMap<String, Kept>,
}

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::computed(format!("the average of `{name}`"), e)
}

impl Average {
    /// Starts with a copy of the parameters, which are f32, in a home.
    ///
    /// # Errors
    /// A decay that is not at least 0 and less than 1; memory runs out.
    pub fn new(parameters: &BTreeMap<String, Kept>, decay: f64, home: &Home) -> Result<Average> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::option("decay of averages", format!("{decay} is not at least 0 and less than 1")));
        }
        let copies = parameters.iter().map(|(name, parameter)| Ok((name.clone(), parameter.copied_to(home)?)));
        Ok(Average { decay, steps: 0, averages: copies.collect::<Result<_>>()? })
    }

    /// Counts a step, whose parameters are taken in from now on.
    pub fn begin_step(&mut self) {
        self.steps += 1;
    }

    /// Takes some of the parameters in as they are after the step.
    ///
    /// # Errors
    /// A parameter that was not there at the start, or has another shape; memory runs out.
    pub fn update(&mut self, parameters: &BTreeMap<String, Tensor>) -> Result<()> {
        let steps = self.steps as f64;
        let share = 1.0 - self.decay.min((1.0 + steps) / (10.0 + steps));
        for (name, parameter) in parameters {
            let Some(kept) = self.averages.get_mut(name) else {
                return Err(Error::tensor(name, "was not among the parameters whose average was begun", ""));
            };
            if kept.dims() != parameter.dims() {
                return Err(Error::tensor(name, format!("its shape is {:?}, that of its average {:?}", parameter.dims(), kept.dims()), ""));
            }
            let average = kept.open()?;
            approach(&average, parameter, share).map_err(failed(name))?;
            kept.put(average)?;
        }
        Ok(())
    }

    /// The averages. The next update changes them in place.
    pub fn parameters(&self) -> &BTreeMap<String, Kept> {
        &self.averages
    }

    /// What [`restore`](Average::restore) takes. The next update changes the averages in place.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn state(&self) -> Result<BTreeMap<String, Kept>> {
        let mut state: BTreeMap<String, Kept> = self.averages.iter().map(|(name, average)| (format!("{PART}{name}"), average.clone())).collect();
        state.insert(STEPS.to_owned(), Tensor::new(&[self.steps as i64], &Device::Cpu).map_err(failed(STEPS))?.into());
        Ok(state)
    }

    /// Goes on where another average of the same parameters has stopped.
    ///
    /// # Errors
    /// A tensor that is missing, belongs to none of the parameters or has another shape, by name.
    pub fn restore(&mut self, state: &mut Stream) -> Result<()> {
        let missing = |name: &str| Error::tensor(name, "is missing in the state", "");
        let (mut steps, mut found) = (None, BTreeSet::new());
        for tensor in state {
            let (part, restored) = tensor?;
            if part == STEPS {
                steps = transfer::read::<i64>(&restored).map_err(failed(STEPS))?.first().and_then(|steps| u64::try_from(*steps).ok());
                continue;
            }
            let average = part.strip_prefix(PART).and_then(|name| self.averages.get_mut(name));
            let average = average.ok_or_else(|| Error::tensor(&part, "is the average of no parameter", ""))?;
            if restored.dims() != average.dims() {
                return Err(Error::tensor(&part, format!("its shape is {:?}, that of the parameter {:?}", restored.dims(), average.dims()), ""));
            }
            average.put(restored.to_dtype(DType::F32).map_err(failed(&part))?)?;
            found.insert(part);
        }
        if let Some(part) = self.averages.iter().filter(|(_, kept)| kept.is_here()).map(|(name, _)| format!("{PART}{name}")).find(|part| !found.contains(part))
        {
            return Err(missing(&part));
        }
        self.steps = steps.ok_or_else(|| missing(STEPS))?;
        Ok(())
    }

    /// Bytes of the averages that are in memory.
    pub fn bytes(&self) -> u64 {
        self.averages.values().map(Kept::bytes).sum()
    }
}

fn approach(average: &Tensor, parameter: &Tensor, share: f64) -> candle_core::Result<()> {
    if !on_host(average.device()) {
        let parameter = transfer::beside(parameter, average.device(), Cause::Offload)?.to_dtype(DType::F32)?;
        return floats::assign(average, &(average + (parameter - average)?.affine(share, 0.0)?)?);
    }
    floats::read(&floats::on_host(parameter)?, |parameter| {
        floats::change(average, |average: &mut [f32]| {
            average.par_chunks_mut(CHUNK).zip(parameter.par_chunks(CHUNK)).for_each(|(a, x)| update::approach(a, share as f32, x));
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(value: f32) -> BTreeMap<String, Tensor> {
        BTreeMap::from([("w".into(), Tensor::new(&[value, -value], &Device::Cpu).unwrap())])
    }

    fn opened((name, kept): (String, Kept)) -> Result<(String, Tensor)> {
        Ok((name, kept.open()?))
    }

    fn kept(tensors: &BTreeMap<String, Tensor>) -> BTreeMap<String, Kept> {
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into())).collect()
    }

    fn begun(start: &BTreeMap<String, Tensor>, decay: f64) -> Result<Average> {
        Average::new(&kept(start), decay, &Home::Memory(Device::Cpu))
    }

    fn held(average: &Average) -> f32 {
        average.parameters()["w"].open().unwrap().to_vec1::<f32>().unwrap()[0]
    }

    #[test]
    fn averages_follow() {
        let start = one(0.0);
        let mut average = begun(&start, 0.25).unwrap();
        average.begin_step();
        average.update(&one(11.0)).unwrap();
        // 2 / 11 is less than 0.25, 3 / 12 is as much.
        assert!((held(&average) - 9.0).abs() < 1e-5);
        average.begin_step();
        average.update(&one(1.0)).unwrap();
        assert!((held(&average) - 3.0).abs() < 1e-5);
        assert_eq!(start["w"].to_vec1::<f32>().unwrap()[0], 0.0);
        let mut again = begun(&start, 0.25).unwrap();
        again.restore(&mut average.state().unwrap().into_iter().map(opened)).unwrap();
        average.begin_step();
        again.begin_step();
        average.update(&one(5.0)).unwrap();
        again.update(&one(5.0)).unwrap();
        assert_eq!((held(&average), again.bytes()), (held(&again), 8));
    }

    #[test]
    fn what_does_not_belong_is_named() {
        assert!(begun(&one(0.0), 1.0).is_err());
        let mut average = begun(&one(0.0), 0.5).unwrap();
        let other = BTreeMap::from([("v".into(), one(0.0).remove("w").unwrap())]);
        assert!(average.update(&other).unwrap_err().to_string().contains("`v`"));
        assert!(average.restore(&mut std::iter::empty()).is_err());
        let mut state = begun(&one(0.0), 0.5).unwrap().state().unwrap();
        state.insert("average/x".into(), one(0.0).remove("w").unwrap().into());
        assert!(average.restore(&mut state.into_iter().map(opened)).unwrap_err().to_string().contains("`average/x`"));
    }
}
