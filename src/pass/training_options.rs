//! Option structs of the training passes: their own keys, followed by the shared ones.

/// Defines the option struct of a training pass: its own keys, then those of
/// [`Training`](crate::train::Training).
macro_rules! training_pass {
    ($($pass:tt)*) => {
        compress_engine::training_options! { [$crate::pass::training_options::define_options] $($pass)* }
    };
}

macro_rules! define_options {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$own_attribute:meta])* $own:ident: $own_type:ty,)* }
        [shared] $($(#[$attribute:meta])* $field:ident: $type:ty = $default:expr,)*
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$own_attribute])* pub $own: $own_type,)*
            $($(#[$attribute])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($own: <$own_type>::default(),)* $($field: $default,)* }
            }
        }

        impl $name {
            /// The options, except the ones that a resumed training may change.
            fn fixed(&self) -> serde_json::Value {
                let mut options = $crate::pass::options_of(self);
                for name in ["max_steps", "epochs", "patience", "final_checkpoint"] {
                    options.as_object_mut().and_then(|options| options.remove(name));
                }
                options
            }

            /// The shared training options.
            pub(crate) fn training(&self) -> $crate::train::Training {
                $crate::train::Training { $($field: Clone::clone(&self.$field),)* }
            }
        }
    };
}

pub(super) use {define_options, training_pass};
