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

/// Requirements on the statistics.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// Whether single images have ranges of their own.
    pub single_images: bool,
    /// Whether models are also quantized in which some of the layers stay in floats.
    pub subsets: bool,
}

impl QuantizeStatic {
    /// Collects statistics of all values to be quantized.
    pub(super) fn observe(&self, prepared: &mut Prepared, needs: Needs, context: &Context) -> Result<BTreeMap<String, ValueStatistics>> {
        let mut requests = self.requests(prepared, needs)?;
        let graph = bodies::observed(prepared, &mut requests, self.observer.needs_joint_histogram(false))?;
        let statistics = calibrate::statistics(NAME, &graph, &prepared.model, &requests, context)?;
        bodies::deselect_unobserved(prepared, &graph, &statistics, context.data.calibration.as_ref().and_then(|data| data.batch_size)).map(|()| statistics)
    }

    fn requests(&self, prepared: &Prepared, needs: Needs) -> Result<BTreeMap<String, Request>> {
        let (graph, sites) = (&prepared.graph, Sites::new(&prepared.graph, &prepared.layers));
        let mut requests = sites.requests(graph);
        for id in sites.values.keys() {
            let Some(request) = requests.get_mut(&graph.value(*id).name) else { continue };
            // A text has too few tokens for a range of its own.
            let is_image = self.observer == ActivationObserver::Mse && request.axis == Axis::Second;
            let costs = if is_image { self.costs(prepared, &prepared.layers, *id)? } else { Vec::new() };
            // Without the layers that read a value, the errors of its channels have no weights.
            request.joint = self.observer.needs_joint_histogram(!costs.is_empty() && !needs.subsets);
            request.weights = Some(costs).filter(|costs| needs.single_images && !costs.is_empty()).map(Into::into);
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

    /// Makes the best ranges of single images those of the model, which `is_rescaled` since it was observed:
    /// if necessary, it is observed again. Drops the ranges of images that are small on average.
    pub(super) fn update_ranges(
        &self,
        prepared: &mut Prepared,
        statistics: &mut BTreeMap<String, ValueStatistics>,
        is_rescaled: bool,
        subsets: bool,
        context: &Context,
    ) -> Result<()> {
        if !self.may_have_single_images(prepared) {
            return Ok(());
        }
        if statistics.values().all(|value| value.rows_per_sample() < MIN_PIXELS as u64) {
            statistics.values_mut().for_each(ValueStatistics::drop_sample_ranges);
            return Ok(());
        }
        let needs = Needs { single_images: true, subsets };
        if is_rescaled || self.lacks_ranges(prepared, statistics, needs)? {
            *statistics = self.observe(prepared, needs, context)?;
        }
        Ok(())
    }

    /// Whether a best range of single images is missing, or was found for other weights of the errors.
    fn lacks_ranges(&self, prepared: &Prepared, statistics: &BTreeMap<String, ValueStatistics>, needs: Needs) -> Result<bool> {
        let requests = self.requests(prepared, needs)?;
        let mut weighted = requests.iter().filter_map(|(name, request)| Some((name, request.weights.as_ref()?)));
        Ok(weighted.any(|(name, weights)| statistics.get(name).is_none_or(|found| !found.has_sample_ranges(weights))))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::prepare::prepare;
    use super::*;
    use crate::exec::Inputs;
    use crate::pass::testing::{self, calibrated, numbers};

    /// Without weights of the channels' errors, ranges follow from the histogram of all channels: for inputs
    /// of grouped convolutions, for outputs, and if the layers that read a value may stay in floats.
    #[test]
    fn ranges_without_weights_need_the_joint_histogram() {
        let conv = |groups: usize| format!("Conv{{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":{groups}}}");
        let text = format!(
            "input x: float[batch, 4, 8, 8]\nparam a.weight: float[4, 4, 1, 1]\nparam b.weight: float[4, 2, 1, 1]\n\
            first = {}(x, a.weight) -> float[batch, 4, 8, 8]\nrelu = Relu(first) -> float[batch, 4, 8, 8]\n\
            y = {}(relu, b.weight) -> float[batch, 4, 8, 8]\noutput y = y\n",
            conv(1),
            conv(2)
        );
        let (_folder, model) = testing::model(&text, |_, shape| numbers(shape)).unwrap();
        let prepared = prepare(NAME, model, &[], &[]).unwrap();
        let joint = |observer: ActivationObserver, subsets: bool| {
            let pass = QuantizeStatic { observer, ..QuantizeStatic::default() };
            let requests = pass.requests(&prepared, Needs { single_images: false, subsets }).unwrap();
            ["x", "relu", "y"].map(|name| requests[name].joint)
        };
        assert_eq!(joint(ActivationObserver::Mse, false), [false, true, true]);
        assert_eq!(joint(ActivationObserver::Mse, true), [true; 3]);
        assert_eq!([ActivationObserver::Minmax, ActivationObserver::Percentile].map(|observer| joint(observer, true)), [[false; 3], [true; 3]]);
    }

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
                let (mut prepared, statistics, choices) = pass.analyze_and_rescale(model.clone(), false, context)?;
                let needs = Needs { single_images: pass.expects_single_images(&prepared, context)?, subsets: false };
                let observed_again = pass.observe(&mut prepared, needs, context)?;
                assert!(needs.single_images && !pass.lacks_ranges(&prepared, &observed_again, needs)?, "a second run is necessary only after rescaling");
                let range = |value: ValueStatistics| pass.range(&value, &vec![1.0; value.channels().channels()]);
                let ranges = |statistics: BTreeMap<String, ValueStatistics>| statistics.into_values().map(range).collect::<Vec<_>>();
                Ok((choices.len(), [statistics, observed_again].map(ranges)))
            })
            .unwrap();
            let (choices, ranges) = found.unwrap();
            assert_eq!((choices, ranges[0].len()), (usize::from(!is_even), 3));
            assert_eq!(ranges[0], ranges[1], "{is_even}");
        }
    }
}
