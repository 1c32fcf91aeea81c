//! Exponential moving average of the parameters (Polyak & Juditsky 1992).

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::checkpoint::Stream;
use super::floats::{self, CHUNK};
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::exec::{ManagedTensor, Placement};
use crate::ir::ops::on_host;
use crate::kernel::update;

/// Name of the step count in the saved state. It cannot collide with a parameter, because those have the
/// prefix `average/`.
const STEPS: &str = "averaged";
const PART: &str = "average/";

/// `average = d · average + (1 - d) · parameter`, with `d = min(decay, (1 + t) / (10 + t))` in step `t`,
/// counted from 1: the smaller decay of the first steps lets the average follow the parameters quickly.
pub struct Average {
    decay: f64,
    steps: u64,
    averages: BTreeMap<String, ManagedTensor>,
}

fn failed(name: &str) -> impl FnOnce(candle_core::Error) -> Error {
    move |e| Error::candle(format!("the average of `{name}`"), e)
}

impl Average {
    /// Starts with a copy of the parameters, which are f32. Fails if the decay is not in `0.0..1.0`.
    pub fn new(parameters: &BTreeMap<String, ManagedTensor>, decay: f64, home: &Placement) -> Result<Average> {
        if !(0.0..1.0).contains(&decay) {
            return Err(Error::option("decay of averages", format!("{decay} is not at least 0 and less than 1")));
        }
        let copies = parameters.iter().map(|(name, parameter)| Ok((name.clone(), parameter.copied_to(home)?)));
        Ok(Average { decay, steps: 0, averages: copies.collect::<Result<_>>()? })
    }

    /// Advances the step count; call it once per step, before [`update`](Average::update).
    pub fn begin_step(&mut self) {
        self.steps += 1;
    }

    /// Updates the averages of the given parameters with their values after the step. Fails if a parameter
    /// was not passed to [`new`](Average::new) or has a different shape.
    pub fn update(&mut self, parameters: &BTreeMap<String, Tensor>) -> Result<()> {
        let steps = self.steps as f64;
        let rate = 1.0 - self.decay.min((1.0 + steps) / (10.0 + steps));
        for (name, parameter) in parameters {
            let Some(managed) = self.averages.get_mut(name) else {
                return Err(Error::tensor(name, "is not one of the averaged parameters", ""));
            };
            if managed.local_dims() != parameter.dims() {
                return Err(Error::tensor(name, format!("its shape is {:?}, that of its average {:?}", parameter.dims(), managed.local_dims()), ""));
            }
            let average = managed.open()?;
            approach(&average, parameter, rate).map_err(failed(name))?;
            managed.put(average)?;
        }
        Ok(())
    }

    /// The averaged parameters. The next update modifies them in place.
    pub fn parameters(&self) -> &BTreeMap<String, ManagedTensor> {
        &self.averages
    }

    /// The tensors that [`restore`](Average::restore) reads. The next update modifies the averages in place.
    pub fn state(&self) -> Result<BTreeMap<String, ManagedTensor>> {
        let mut state: BTreeMap<String, ManagedTensor> = self.averages.iter().map(|(name, average)| (format!("{PART}{name}"), average.clone())).collect();
        state.insert(STEPS.to_owned(), Tensor::new(&[self.steps as i64], &Device::Cpu).map_err(failed(STEPS))?.into());
        Ok(state)
    }

    /// Replaces the averages and the step count with a saved state. Fails if a tensor is missing, belongs to
    /// no parameter, or has a different shape.
    pub fn restore(&mut self, state: &mut Stream) -> Result<()> {
        let missing = |name: &str| Error::tensor(name, "is missing in the saved state", "");
        let (mut steps, mut found) = (None, BTreeSet::new());
        for tensor in state {
            let (part, restored) = tensor?;
            if part == STEPS {
                steps = transfer::read::<i64>(&restored).map_err(failed(STEPS))?.first().and_then(|steps| u64::try_from(*steps).ok());
                continue;
            }
            let average = part.strip_prefix(PART).and_then(|name| self.averages.get_mut(name));
            let average = average.ok_or_else(|| Error::tensor(&part, "does not belong to a parameter of this training", ""))?;
            if restored.dims() != average.local_dims() {
                return Err(Error::tensor(&part, format!("its shape is {:?}, that of the parameter {:?}", restored.dims(), average.local_dims()), ""));
            }
            average.put(restored.to_dtype(DType::F32).map_err(failed(&part))?)?;
            found.insert(part);
        }
        if let Some(part) =
            self.averages.iter().filter(|(_, managed)| managed.is_local()).map(|(name, _)| format!("{PART}{name}")).find(|part| !found.contains(part))
        {
            return Err(missing(&part));
        }
        self.steps = steps.ok_or_else(|| missing(STEPS))?;
        Ok(())
    }

    /// Memory size of the averages, in bytes, without offloaded ones.
    pub fn bytes(&self) -> u64 {
        self.averages.values().map(ManagedTensor::bytes).sum()
    }
}

/// `average += rate * (parameter - average)`, in place.
fn approach(average: &Tensor, parameter: &Tensor, rate: f64) -> candle_core::Result<()> {
    if !on_host(average.device()) {
        let parameter = transfer::move_to(parameter, average.device(), Cause::Offload)?.to_dtype(DType::F32)?;
        return floats::assign(average, &(average + (parameter - average)?.affine(rate, 0.0)?)?);
    }
    floats::read(&floats::on_host(parameter)?, |parameter| {
        floats::change(average, |average: &mut [f32]| {
            average.par_chunks_mut(CHUNK).zip(parameter.par_chunks(CHUNK)).for_each(|(a, x)| update::approach(a, rate as f32, x));
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

    fn open_named((name, managed): (String, ManagedTensor)) -> Result<(String, Tensor)> {
        Ok((name, managed.open()?))
    }

    fn managed(tensors: &BTreeMap<String, Tensor>) -> BTreeMap<String, ManagedTensor> {
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.clone().into())).collect()
    }

    fn new_average(start: &BTreeMap<String, Tensor>, decay: f64) -> Result<Average> {
        Average::new(&managed(start), decay, &Placement::Memory(Device::Cpu))
    }

    fn first_value(average: &Average) -> f32 {
        average.parameters()["w"].open().unwrap().to_vec1::<f32>().unwrap()[0]
    }

    #[test]
    fn averages_follow_the_parameters_and_resume() {
        let start = one(0.0);
        let mut average = new_average(&start, 0.25).unwrap();
        average.begin_step();
        average.update(&one(11.0)).unwrap();
        // d is 2 / 11 in the first step, 3 / 12 in the second.
        assert!((first_value(&average) - 9.0).abs() < 1e-5);
        average.begin_step();
        average.update(&one(1.0)).unwrap();
        assert!((first_value(&average) - 3.0).abs() < 1e-5);
        assert_eq!(start["w"].to_vec1::<f32>().unwrap()[0], 0.0);
        let mut again = new_average(&start, 0.25).unwrap();
        again.restore(&mut average.state().unwrap().into_iter().map(open_named)).unwrap();
        average.begin_step();
        again.begin_step();
        average.update(&one(5.0)).unwrap();
        again.update(&one(5.0)).unwrap();
        assert_eq!((first_value(&average), again.bytes()), (first_value(&again), 8));
    }

    #[test]
    fn errors_name_the_tensor() {
        assert!(new_average(&one(0.0), 1.0).is_err());
        let mut average = new_average(&one(0.0), 0.5).unwrap();
        let other = BTreeMap::from([("v".into(), one(0.0).remove("w").unwrap())]);
        assert!(average.update(&other).unwrap_err().to_string().contains("`v`"));
        assert!(average.restore(&mut std::iter::empty()).is_err());
        let mut state = new_average(&one(0.0), 0.5).unwrap().state().unwrap();
        state.insert("average/x".into(), one(0.0).remove("w").unwrap().into());
        assert!(average.restore(&mut state.into_iter().map(open_named)).unwrap_err().to_string().contains("`average/x`"));
    }
}
