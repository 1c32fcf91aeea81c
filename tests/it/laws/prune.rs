//! Property: pruning removes the smallest values in sorted order.

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::given::{FLOATS, Values, config, long, model, rank, shape};
use crate::common::{DType, Desk, Tensor, Tensors, all, pipeline, read};
use compress::pass::{Amount, NOfM, PruneUnstructured, Rule, Scope};

const NARROW: &[DType] = &[DType::F16, DType::BF16, DType::F32];

fn prune(amount: Amount, scope: Scope) -> PruneUnstructured {
    PruneUnstructured { amount: Some(amount), scope, targets: all(), ..Default::default() }
}

/// The model with its `count` smallest elements zeroed: ordered by magnitude, then by name, then by
/// position.
fn sorted(model: &Tensors, count: usize) -> Tensors {
    let mut order = Vec::new();
    for (name, tensor) in model {
        order.extend(tensor.bits().into_iter().enumerate().map(|(position, bits)| (rank(tensor.dtype, bits), name, position)));
    }
    order.sort();
    let mut after = model.clone();
    for (_, name, position) in order.drain(..count) {
        let tensor = after.get_mut(name).unwrap();
        let size = tensor.dtype.bitsize() / 8;
        tensor.bytes[position * size..(position + 1) * size].fill(0);
    }
    after
}

fn count(amount: Amount, model: &Tensors) -> usize {
    amount.of(model.values().map(|t| t.bits().len() as u64).sum()).unwrap() as usize
}

fn one_by_one(model: &Tensors, after: impl Fn(&Tensors) -> Tensors) -> Tensors {
    model.iter().flat_map(|(name, tensor)| after(&Tensors::from([(name.clone(), tensor.clone())]))).collect()
}

/// Prunes, compares the result with the definition, and prunes again.
fn check(before: &Tensors, pass: PruneUnstructured, expected: &Tensors) {
    let desk = Desk::new();
    let after = desk.apply(before, pass.clone()).unwrap();
    assert_eq!(after, *expected, "{pass:?}");
    assert_eq!(desk.apply(&after, pass.clone()).unwrap(), after, "twice is not once: {pass:?}");
}

fn fraction() -> impl Strategy<Value = Amount> {
    prop_oneof![(0.0..=1.0), select(vec![0.0, 0.5, 1.0])].prop_map(Amount::fraction)
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn each_tensor_loses_its_smallest(before in model(&FLOATS, shape(1..=4, 5), Values::Any, 1..=3), amount in fraction()) {
        let expected = one_by_one(&before, |alone| sorted(alone, count(amount, alone)));
        check(&before, prune(amount, Scope::Tensor), &expected);
    }

    #[test]
    fn a_model_loses_its_smallest_across_types(before in model(NARROW, shape(1..=4, 5), Values::Any, 1..=4), amount in fraction()) {
        check(&before, prune(amount, Scope::Global), &sorted(&before, count(amount, &before)));
    }

    #[test]
    fn doubles_are_ranked_among_themselves(before in model(&[DType::F64], shape(1..=3, 6), Values::Any, 1..=3), amount in fraction()) {
        check(&before, prune(amount, Scope::Global), &sorted(&before, count(amount, &before)));
    }

    #[test]
    fn counts_are_exact_and_global_equals_tensor_for_one_tensor(before in model(&FLOATS, shape(1..=4, 5), Values::Any, 1..=1), index in any::<Index>()) {
        let elements = before["t0.weight"].bits().len();
        let amount = Amount::Count(index.index(elements + 1) as u64);
        let expected = sorted(&before, count(amount, &before));
        for scope in [Scope::Tensor, Scope::Global] {
            check(&before, prune(amount, scope), &expected);
        }
        let error = Desk::new().apply(&before, prune(Amount::Count(elements as u64 + 1), Scope::Tensor)).unwrap_err();
        prop_assert!(error.to_string().contains("`t0.weight`"), "{}", error);
    }

    #[test]
    fn options_without_effect_change_no_byte(
        before in prop_oneof![model(NARROW, shape(2..=4, 4), Values::Any, 1..=3), model(&[DType::F64], shape(2..=4, 4), Values::Any, 1..=3)]
    ) {
        let ones = NOfM { n: 1, m: 1 };
        let pattern = PruneUnstructured { pattern: Some(ones), targets: all(), ..Default::default() };
        let nothing = [Amount::Count(0), Amount::fraction(0.0)].map(|amount| [Scope::Tensor, Scope::Global].map(|scope| prune(amount, scope)));
        for pass in nothing.into_iter().flatten().chain([pattern]) {
            check(&before, pass, &before);
        }
    }

    #[test]
    fn patterns_keep_n_of_every_m(
        (pattern, before) in (1..=6usize, 1..=3usize).prop_flat_map(|(m, groups)| {
            let shapes = (1..=4usize, shape(0..=2, 3)).prop_map(move |(rows, rest)| [vec![rows, m * groups], rest].concat()).boxed();
            ((0..=m).prop_map(move |n| NOfM { n, m }), model(&FLOATS, shapes, Values::Any, 1..=2))
        })
    ) {
        let NOfM { n, m } = pattern;
        let mut expected = before.clone();
        for tensor in expected.values_mut() {
            let stride: usize = tensor.shape[2..].iter().product();
            let (dtype, mut bits) = (tensor.dtype, tensor.bits());
            for lane in (0..bits.len()).filter(|i| (i / stride).is_multiple_of(m)) {
                let mut order: Vec<usize> = (0..m).map(|i| lane + i * stride).collect();
                order.sort_by_key(|&i| (rank(dtype, bits[i]), i));
                order[..m - n].iter().for_each(|&i| bits[i] = 0);
            }
            *tensor = Tensor::from_bits(dtype, &tensor.shape, &bits);
        }
        check(&before, PruneUnstructured { pattern: Some(pattern), targets: all(), ..Default::default() }, &expected);
    }

    #[test]
    fn a_rule_equals_a_separate_pass(before in model(NARROW, shape(1..=2, 8), Values::Any, 3..=4), amounts in (fraction(), fraction()), global in any::<bool>()) {
        let scope = if global { Scope::Global } else { Scope::Tensor };
        let special = vec!["t1".parse().unwrap(), "t2.weight".parse().unwrap()];
        let rule = Rule { targets: special.clone(), amount: amounts.1 };
        let together = PruneUnstructured { rules: vec![rule], ..prune(amounts.0, scope) };
        let first = PruneUnstructured { targets: special.clone(), ..prune(amounts.1, scope) };
        let rest = PruneUnstructured { ignore: special, ..prune(amounts.0, scope) };
        let desk = Desk::new();
        let apart = desk.run(&desk.weights(&before), pipeline().pass(first).pass(rest)).unwrap();
        prop_assert_eq!(desk.apply(&before, together).unwrap(), read(&apart.path));
    }
}

#[test]
fn long_tensors_are_pruned_like_short_ones() {
    for (seed, dtype) in FLOATS.into_iter().enumerate() {
        let before = long(dtype, &[1301, 211], seed as u64);
        for amount in [Amount::fraction(0.3), Amount::Count(200_001)] {
            check(&before, prune(amount, Scope::Global), &sorted(&before, count(amount, &before)));
        }
    }
}

/// Without a graph, the length of the bias shows which kernels are those of transposed convolutions, which
/// store the inputs first. Other kernels are reported.
#[test]
fn kernels_without_a_graph_are_oriented_by_their_bias() {
    let desk = Desk::new();
    let random = |shape: &[usize]| Tensor::random(DType::F32, shape, shape.len() as u64);
    let shapes: [(&str, &[usize]); 5] =
        [("up.weight", &[8, 4, 2, 2]), ("up.bias", &[4]), ("down.weight", &[4, 8, 2, 2]), ("down.bias", &[4]), ("alone.weight", &[4, 8, 2, 2])];
    let before = Tensors::from(shapes.map(|(name, shape)| (name.to_owned(), random(shape))));
    let pass = PruneUnstructured { pattern: Some(NOfM { n: 2, m: 4 }), targets: vec!["*.weight".parse().unwrap()], ..Default::default() };
    let output = desk.run(&desk.weights(&before), pipeline().pass(pass)).unwrap();
    let after = read(&output.path);
    for (name, stride) in [("up.weight", 16), ("down.weight", 4), ("alone.weight", 4)] {
        let values = after[name].values();
        let groups = (0..values.len()).filter(|at| (at / stride).is_multiple_of(4));
        assert!(groups.map(|first| (0..4).filter(|at| values[first + at * stride] == 0.0).count()).all(|zeros| zeros == 2), "{name}: {values:?}");
    }
    let notes: Vec<&String> = output.report.notes.iter().filter(|note| note.contains("second axis")).collect();
    assert!(notes.len() == 1 && notes[0].contains("1 kernel (the first: `alone.weight`)"), "{notes:?}");
}

#[test]
fn a_note_states_the_zeros_of_lightly_pruned_tensors() {
    let desk = Desk::new();
    let before = Tensors::from([("a.weight".to_owned(), Tensor::random(DType::F32, &[20, 20], 1))]);
    for (share, stated) in [(0.05, "5 % zeros in the pruned tensors"), (0.5, "50 % zeros in the pruned tensors")] {
        let notes = desk.run(&desk.weights(&before), pipeline().pass(prune(Amount::fraction(share), Scope::Tensor))).unwrap().report.notes;
        assert!(notes.iter().any(|note| note.starts_with(stated)), "{notes:?}");
    }
}

#[test]
fn doubles_are_not_ranked_with_others() {
    let mut before = long(DType::F64, &[2, 3], 0);
    before.insert("u.weight".into(), before["t0.weight"].clone());
    before.extend([("v.weight".into(), long(DType::F32, &[2, 3], 1)["t0.weight"].clone())]);
    let error = Desk::new().apply(&before, prune(Amount::fraction(0.5), Scope::Global)).unwrap_err().to_string();
    assert!(error.contains("`t0.weight`") && error.contains("F64"), "{error}");
}
