//! Averages of parameters over the steps of a run (Polyak & Juditsky 1992), with weights that fall exponentially.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::checkpoint::Stream;
use super::floats::{self, CHUNK};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
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
    averages: BTreeMap<String, Tensor>,
}

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::computed(format!("the average of `{name}`"), e)
}

impl Average {
    /// Starts with a copy of the parameters, as f32 on the given device.
    ///
    /// # Errors
    /// A decay that is not at least 0 and less than 1; memory runs out.
    pub fn new(parameters: &BTreeMap<String, Tensor>, decay: f64, on: &Device) -> Result<Average> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::option("decay of averages", format!("{decay} is not at least 0 and less than 1")));
        }
        let copy = |(name, parameter): (&String, &Tensor)| {
            let copied = || transfer::beside(parameter, on, Cause::Offload)?.to_dtype(DType::F32)?.force_contiguous();
            Ok((name.clone(), copied().map_err(failed(name))?))
        };
        Ok(Average { decay, steps: 0, averages: parameters.iter().map(copy).collect::<Result<_>>()? })
    }

    /// Takes the parameters in as they are after a step.
    ///
    /// # Errors
    /// A parameter that was not there at the start, or has another shape; memory runs out.
    pub fn update(&mut self, parameters: &BTreeMap<String, Tensor>) -> Result<()> {
        self.steps += 1;
        let steps = self.steps as f64;
        let share = 1.0 - self.decay.min((1.0 + steps) / (10.0 + steps));
        for (name, parameter) in parameters {
            let Some(average) = self.averages.get(name) else {
                return Err(Error::tensor(name, "was not among the parameters whose average was begun", ""));
            };
            if average.dims() != parameter.dims() {
                return Err(Error::tensor(name, format!("its shape is {:?}, that of its average {:?}", parameter.dims(), average.dims()), ""));
            }
            approach(average, parameter, share).map_err(failed(name))?;
        }
        Ok(())
    }

    /// The averages. The next update changes them in place.
    pub fn parameters(&self) -> &BTreeMap<String, Tensor> {
        &self.averages
    }

    /// What [`restore`](Average::restore) takes. The next update changes the averages in place.
    ///
    /// # Errors
    /// Memory runs out.
    pub fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut state: BTreeMap<String, Tensor> = self.averages.iter().map(|(name, average)| (format!("{PART}{name}"), average.clone())).collect();
        state.insert(STEPS.to_owned(), Tensor::new(&[self.steps as i64], &Device::Cpu).map_err(failed(STEPS))?);
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
            let average = part.strip_prefix(PART).and_then(|name| self.averages.get(name));
            let average = average.ok_or_else(|| Error::tensor(&part, "is the average of no parameter", ""))?;
            if restored.dims() != average.dims() {
                return Err(Error::tensor(&part, format!("its shape is {:?}, that of the parameter {:?}", restored.dims(), average.dims()), ""));
            }
            transfer::beside(&restored, average.device(), Cause::State).and_then(|restored| floats::assign(average, &restored)).map_err(failed(&part))?;
            found.insert(part);
        }
        if let Some(part) = self.averages.keys().map(|name| format!("{PART}{name}")).find(|part| !found.contains(part)) {
            return Err(missing(&part));
        }
        self.steps = steps.ok_or_else(|| missing(STEPS))?;
        Ok(())
    }

    /// Bytes of the averages.
    pub fn bytes(&self) -> u64 {
        self.averages.values().map(|average| 4 * average.elem_count() as u64).sum()
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

    fn held(average: &Average) -> f32 {
        average.parameters()["w"].to_vec1::<f32>().unwrap()[0]
    }

    #[test]
    fn averages_follow() {
        let start = one(0.0);
        let mut average = Average::new(&start, 0.25, &Device::Cpu).unwrap();
        average.update(&one(11.0)).unwrap();
        // 2 / 11 is less than 0.25, 3 / 12 is as much.
        assert!((held(&average) - 9.0).abs() < 1e-5);
        average.update(&one(1.0)).unwrap();
        assert!((held(&average) - 3.0).abs() < 1e-5);
        assert_eq!(start["w"].to_vec1::<f32>().unwrap()[0], 0.0);
        let mut again = Average::new(&start, 0.25, &Device::Cpu).unwrap();
        again.restore(&mut average.state().unwrap().into_iter().map(Ok)).unwrap();
        average.update(&one(5.0)).unwrap();
        again.update(&one(5.0)).unwrap();
        assert_eq!((held(&average), again.bytes()), (held(&again), 8));
    }

    #[test]
    fn what_does_not_belong_is_named() {
        assert!(Average::new(&one(0.0), 1.0, &Device::Cpu).is_err());
        let mut average = Average::new(&one(0.0), 0.5, &Device::Cpu).unwrap();
        let other = BTreeMap::from([("v".into(), one(0.0).remove("w").unwrap())]);
        assert!(average.update(&other).unwrap_err().to_string().contains("`v`"));
        assert!(average.restore(&mut std::iter::empty()).is_err());
        let mut state = Average::new(&one(0.0), 0.5, &Device::Cpu).unwrap().state().unwrap();
        state.insert("average/x".into(), one(0.0).remove("w").unwrap());
        assert!(average.restore(&mut state.into_iter().map(Ok)).unwrap_err().to_string().contains("`average/x`"));
    }
}
