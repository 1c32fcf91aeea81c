//! Texts with images.

use super::super::proto::{AttributeProto, DataType};
use super::Lowering;
use super::rotary::rotate;
use crate::error::Result;
use crate::ir::ops::{ImageRotary, InsertImages};

/// For tokens `[batch, sequence]`, whether each is that of a patch, and the number of those before it.
fn patches(input: usize, token: i64, n: &mut Lowering) -> Result<[String; 2]> {
    let tokens = n.input(input);
    n.share_many(&format!("patches|{tokens}|{token}"), |n| {
        let (token, axis) = (n.int(token), n.int(1));
        let is_patch = n.emit("Equal", "is_patch", &[&tokens, &token], vec![]);
        let ones = n.cast("patches", &is_patch, DataType::Int64);
        let before = n.emit("CumSum", "patches_before", &[&ones, &axis], vec![AttributeProto::int("exclusive", 1)]);
        Ok([is_patch, before])
    })
}

pub(super) fn insert_images(op: &InsertImages, n: &mut Lowering) -> Result<()> {
    let (x, features, last) = (n.input(0), n.input(2), n.ints(&[2]));
    let [is_patch, before] = patches(1, op.token, n)?;
    let limit = n.int(n.fixed(2, 1)?.saturating_sub(1));
    let patch = n.emit("Min", "patch", &[&before, &limit], vec![]);
    let indices = n.emit("Unsqueeze", "indices", &[&patch, &last], vec![]);
    let rows = n.emit("GatherND", "features", &[&features, &indices], vec![AttributeProto::int("batch_dims", 1)]);
    let is_patch = n.emit("Unsqueeze", "is_patch_of_width", &[&is_patch, &last], vec![]);
    if op.add {
        let zero = n.float(0.0);
        let rows = n.emit("Where", "added", &[&is_patch, &rows, &zero], vec![]);
        n.finish("Add", &[&x, &rows], vec![]);
    } else {
        n.finish("Where", &[&is_patch, &rows, &x], vec![]);
    }
    Ok(())
}

pub(super) fn image_rotary(op: &ImageRotary, n: &mut Lowering) -> Result<()> {
    let width = n.fixed(0, 3)?;
    let turned = op.rotary.turned(usize::try_from(width).unwrap_or(0));
    let (frequencies, factor) = op.rotary.frequencies(turned, 0);
    let what = format!("{}|{width}|{op:?}", n.input(1));
    let angles = n.share(&format!("image_rotary|{what}"), |n| {
        let positions = positions(op, n)?;
        let axis_of_pairs: Vec<i64> = op.axis_of_pairs(turned / 2).into_iter().map(|axis| axis as i64).collect();
        let axis_of_pairs = n.ints(&axis_of_pairs);
        let positions = n.emit("Gather", "of_pairs", &[&positions, &axis_of_pairs], vec![AttributeProto::int("axis", 2)]);
        let (positions, heads) = (n.cast("positions", &positions, DataType::Float), n.ints(&[1]));
        let frequencies = n.floats("rotary/frequencies", &frequencies);
        let angles = n.emit("Mul", "angles_of_tokens", &[&positions, &frequencies], vec![]);
        Ok(n.emit("Unsqueeze", "angles", &[&angles, &heads], vec![]))
    })?;
    let mut tables = [String::new(), String::new()];
    for (table, function) in tables.iter_mut().zip(["Cos", "Sin"]) {
        *table = n.share(&format!("image_rotary/{function}|{what}"), |n| {
            let (table, factor) = (n.emit(function, "table", &[&angles], vec![]), n.float_wide(factor));
            let table = n.emit("Mul", "scaled", &[&table, &factor], vec![]);
            Ok(n.narrow("narrow", table))
        })?;
    }
    rotate(tables, (turned as i64, width), n);
    Ok(())
}

/// The positions of tokens on the three axes, `[batch, sequence, 3]`.
fn positions(op: &ImageRotary, n: &mut Lowering) -> Result<String> {
    let [is_patch, before] = patches(1, op.token, n)?;
    let (range, last) = (n.range(1, 1)?, n.ints(&[2]));
    let [rows, columns] = op.grid.map(|size| size as i64);
    let (count, longest, columns) = (n.int(rows.saturating_mul(columns)), n.int(rows.max(columns)), n.int(columns));
    let of_text = n.emit("Sub", "texts_before", &[&range, &before], vec![]);
    let images = n.emit("Div", "images_before", &[&before, &count], vec![]);
    let of_images = n.emit("Mul", "of_images", &[&images, &longest], vec![]);
    let start = n.emit("Add", "start", &[&of_text, &of_images], vec![]);
    let patch = n.emit("Mod", "patch_of_image", &[&before, &count], vec![]);
    let places = [("Div", "row"), ("Mod", "column")].map(|(operator, name)| n.emit(operator, name, &[&patch, &columns], vec![]));
    let ones = n.cast("is_patch_number", &is_patch, DataType::Int64);
    let mut axes = vec![start.clone()];
    for (place, name) in places.iter().zip(["of_row", "of_column"]) {
        let place = n.emit("Mul", &format!("{name}_of_patches"), &[place, &ones], vec![]);
        axes.push(n.emit("Add", name, &[&start, &place], vec![]));
    }
    let axes: Vec<String> = axes.iter().zip(["first", "rows", "columns"]).map(|(axis, name)| n.emit("Unsqueeze", name, &[axis, &last], vec![])).collect();
    let axes: Vec<&str> = axes.iter().map(String::as_str).collect();
    Ok(n.emit("Concat", "axes", &axes, vec![AttributeProto::int("axis", 2)]))
}
