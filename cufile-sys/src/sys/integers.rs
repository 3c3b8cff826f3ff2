//! C enums as integers.

/// Declares a C enum as an integer of its size, with a constant for each listed value.
macro_rules! integers {
    ($(
        $(#[$about:meta])*
        $name:ident { $($(#[$what:meta])* $item:ident = $value:expr,)* }
    )*) => {$(
        $(#[$about])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub u32);

        impl $name {
            $($(#[$what])* pub const $item: $name = $name($value);)*

            /// All values of cuFile 1.15 with their C names.
            pub const ALL: &'static [($name, &'static str)] = &[$(($name::$item, stringify!($item)),)*];

            /// The C name of the value, if it is listed.
            pub fn name(self) -> Option<&'static str> {
                Self::ALL.iter().find(|(value, _)| *value == self).map(|(_, name)| *name)
            }

            /// The value that has this C name.
            pub fn named(name: &str) -> Option<$name> {
                Self::ALL.iter().find(|(_, other)| *other == name).map(|(value, _)| *value)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({})"), self.0),
                }
            }
        }
    )*};
}

pub(crate) use integers;
