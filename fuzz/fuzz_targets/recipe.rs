//! Arbitrary text as a recipe: the parser does not crash, and a parsed recipe is unchanged after writing and
//! parsing it.

#![no_main]

use std::path::Path;

use compress::pipeline::Pipeline;
use compress::recipe::Recipe;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let path = Path::new("recipe.yaml");
    let Ok(recipe) = Recipe::parse(text, path) else { return };
    let written = recipe.to_yaml();
    match Recipe::parse(&written, path) {
        Ok(back) => assert_eq!(back, recipe, "written as:\n{written}"),
        Err(error) => panic!("does not parse again: {error}\nwritten as:\n{written}"),
    }
    let _ = Pipeline::builder().recipe(&recipe).build();
});
