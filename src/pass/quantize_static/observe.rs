//! Statistics of the values to be quantized, on calibration samples.

use std::collections::BTreeMap;

use super::prepare::Prepared;
use super::sites::Sites;
use super::{NAME, QuantizeStatic, bodies};
use crate::calibration::{ActivationObserver, Axis, Request, ValueStatistics};
use crate::error::Result;
use crate::ir::{Dim, ValueId};
use crate::pass::consumers::channels_second;
use crate::pass::{Context, calibrate};

/// Minimum number of pixels of an image with a range of its own. Smaller ones have too few values: a network
/// on CIFAR-10 images of 32 × 32 pixels loses accuracy.
const MIN_PIXELS: usize = 128 * 128;

impl QuantizeStatic {
    /// Collects statistics of all values to be quantized, and the best ranges of single images if
    /// `single_images` is set.
    pub(super) fn observe(&self, prepared: &mut Prepared, single_images: bool, context: &Context) -> Result<BTreeMap<String, ValueStatistics>> {
        let mut requests = self.requests(prepared, single_images)?;
        let graph = bodies::observed(prepared, &mut requests, self.observer.needs_whole(false))?;
        let statistics = calibrate::statistics(NAME, &graph, &prepared.model, &requests, context)?;
        bodies::deselect_unobserved(prepared, &graph, &statistics, context.data.calibration.as_ref().and_then(|data| data.batch_size)).map(|()| statistics)
    }

    fn requests(&self, prepared: &Prepared, single_images: bool) -> Result<BTreeMap<String, Request>> {
        let (graph, sites) = (&prepared.graph, Sites::new(&prepared.graph, &prepared.layers));
        // To reach an accuracy goal, the layers that read a value may stay in floats.
        let mut requests = sites.requests(graph, |site| self.observer.needs_whole(site.has_layer && self.accuracy_goal.is_none()));
        if single_images {
            for id in sites.values.keys() {
                // A text has too few tokens for a range of its own.
                if let Some(request) = requests.get_mut(&graph.value(*id).name).filter(|request| request.axis == Axis::Second) {
                    request.weights = Some(self.costs(prepared, &prepared.layers, *id)?).filter(|costs| !costs.is_empty()).map(Into::into);
                }
            }
        }
        Ok(requests)
    }

    /// Whether single images will have ranges of their own, as far as the sizes of the first batch show.
    pub(super) fn expects_single_images(&self, prepared: &Prepared, context: &Context) -> Result<bool> {
        if !self.may_have_single_images(prepared) {
            return Ok(false);
        }
        let (graph, sites) = (&prepared.graph, Sites::new(&prepared.graph, &prepared.layers));
        let sizes = calibrate::first_sizes(NAME, graph, &prepared.model, context)?;
        let pixels = |shape: &[Dim]| shape.get(2..)?.iter().try_fold(1usize, |all, size| all.checked_mul(size.evaluate(&sizes)?));
        let is_large = |id: &ValueId| channels_second(graph, *id) && pixels(&graph.value(*id).ty.shape).is_some_and(|pixels| pixels >= MIN_PIXELS);
        Ok(sites.values.keys().any(is_large))
    }

    /// Whether single images have ranges of their own if they are large.
    fn may_have_single_images(&self, prepared: &Prepared) -> bool {
        self.observer == ActivationObserver::Mse && prepared.has_images()
    }

    /// Whether the statistics lack the best ranges of single images for the weights of the model.
    pub(super) fn lacks_ranges(&self, prepared: &Prepared, statistics: &BTreeMap<String, ValueStatistics>) -> Result<bool> {
        let are_large = statistics.values().any(|value| value.rows_per_sample() >= MIN_PIXELS as u64);
        if !self.may_have_single_images(prepared) || !are_large {
            return Ok(false);
        }
        let requests = self.requests(prepared, true)?;
        let mut weighted = requests.iter().filter_map(|(name, request)| Some((name, request.weights.as_ref()?)));
        Ok(weighted.any(|(name, weights)| statistics.get(name).is_none_or(|found| !found.has_sample_ranges(weights))))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::exec::Inputs;
    use crate::pass::testing::{self, calibrated, numbers};

    /// Ranges of single images are those of the rescaled model, whether or not it is observed again.
    #[test]
    fn ranges_of_single_images_are_those_of_the_rescaled_model() {
        let conv = "Conv{\"stride\":1,\"padding\":1,\"dilation\":1,\"groups\":1}";
        const SIZE: usize = 128;
        for is_even in [true, false] {
            let text = format!(
                "input x: float[batch, 3, {SIZE}, {SIZE}]\nparam a.weight: float[4, 3, 3, 3]\nparam b.weight: float[4, 4, 3, 3]\n\
                first = {conv}(x, a.weight) -> float[batch, 4, {SIZE}, {SIZE}]\nrelu = Relu(first) -> float[batch, 4, {SIZE}, {SIZE}]\n\
                y = {conv}(relu, b.weight) -> float[batch, 4, {SIZE}, {SIZE}]\noutput y = y\n"
            );
            let factor = |name: &str, at: usize| if name == "a.weight" && !is_even { 8f32.powi((at / 27) as i32) } else { 1.0 };
            let values = |name: &str, shape: &[usize]| numbers(shape).into_iter().enumerate().map(|(at, x)| x * factor(name, at)).collect::<Vec<_>>();
            let (_folder, model) = testing::model(&text, values).unwrap();
            let image = Tensor::from_vec(values("x", &[9, 3, SIZE, SIZE]), (9, 3, SIZE, SIZE), &Device::Cpu).unwrap();
            let pass = QuantizeStatic::default();
            let found: Result<_> = calibrated(&Inputs::from([("x".to_owned(), image)]), |context| {
                let (mut prepared, statistics, choices) = pass.analyze_and_rescale(model.clone(), context)?;
                let observed_again = pass.observe(&mut prepared, true, context)?;
                let ranges = |statistics: BTreeMap<String, ValueStatistics>| statistics.into_values().map(|x| pass.range(&x, &[1.0; 4])).collect::<Vec<_>>();
                Ok((choices.len(), [statistics, observed_again].map(ranges)))
            })
            .unwrap();
            let (choices, ranges) = found.unwrap();
            assert_eq!((choices, ranges[0].len()), (usize::from(!is_even), 3));
            assert_eq!(ranges[0], ranges[1], "{is_even}");
        }
    }
}
