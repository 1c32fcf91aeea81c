//! Option structs of the training passes: their own options, and those of
//! [`Training`](crate::train::Training). Recipes and the command line have both at the same level.

/// Defines the option struct of a training pass from its own options, whose attributes for the keys of
/// recipes follow `@`.
macro_rules! training_pass {
    ($($pass:tt)*) => {
        compress_engine::training_options! { [$crate::pass::training_options::define_options] $($pass)* }
    };
}

macro_rules! define_options {
    (
        $(#[$doc:meta])* $name:ident { $($(#[$own_doc:meta])* @ $(#[$own_attribute:meta])* $own:ident: $own_type:ty,)* }
        [shared] $($(#[$field_doc:meta])* @ $(#[$attribute:meta])* $field:ident: $type:ty = $default:expr,)*
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
        #[serde(from = "Keys", into = "Keys")]
        pub struct $name {
            $($(#[$own_doc])* pub $own: $own_type,)*
            /// Options of the training.
            pub training: $crate::train::Training,
        }

        $(#[$doc])*
        #[derive(Clone, serde::Serialize, serde::Deserialize)]
        #[cfg_attr(feature = "cli", derive(clap::Args, schemars::JsonSchema))]
        #[serde(deny_unknown_fields, default, expecting = "the options of the pass")]
        struct Keys {
            $($(#[$own_doc])* $(#[$own_attribute])* $own: $own_type,)*
            $($(#[$field_doc])* $(#[$attribute])* $field: $type,)*
        }

        impl Default for Keys {
            fn default() -> Keys {
                $name::default().into()
            }
        }

        impl From<Keys> for $name {
            fn from(keys: Keys) -> $name {
                $name { $($own: keys.$own,)* training: $crate::train::Training { $($field: keys.$field,)* } }
            }
        }

        impl From<$name> for Keys {
            fn from(pass: $name) -> Keys {
                Keys { $($own: pass.$own,)* $($field: pass.training.$field,)* }
            }
        }

        #[cfg(feature = "cli")]
        mod command_line {
            use super::{Keys, $name};

            impl clap::FromArgMatches for $name {
                fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Self, clap::Error> {
                    Keys::from_arg_matches(matches).map(Self::from)
                }

                fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
                    let mut keys = Keys::from(self.clone());
                    keys.update_from_arg_matches(matches)?;
                    *self = keys.into();
                    Ok(())
                }
            }

            impl clap::Args for $name {
                fn augment_args(command: clap::Command) -> clap::Command {
                    Keys::augment_args(command)
                }

                fn augment_args_for_update(command: clap::Command) -> clap::Command {
                    Keys::augment_args_for_update(command)
                }
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
        }
    };
}

pub(super) use {define_options, training_pass};
