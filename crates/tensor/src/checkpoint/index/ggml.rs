use std::fmt;

macro_rules! types {
    // name, number, elements of a block, bytes of a block
    ($($name:ident $id:literal $block:literal $bytes:literal;)*) => {
        /// How GGUF stores elements, by ggml's names: in blocks of so many elements and bytes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types, missing_docs)]
        pub enum GgmlType {
            $($name,)*
        }

        impl GgmlType {
            /// All that are known.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The type with this number in a file. The numbers of types that ggml has removed are unknown.
            pub fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Its number in a file.
            pub fn id(self) -> u32 {
                match self {
                    $(Self::$name => $id,)*
                }
            }

            /// ggml's name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Elements in a block.
            pub fn block(self) -> u64 {
                match self {
                    $(Self::$name => $block,)*
                }
            }

            /// Bytes of a block.
            pub fn block_bytes(self) -> u64 {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }
        }
    };
}

types! {
    F32 0 1 4;
    F16 1 1 2;
    Q4_0 2 32 18;
    Q4_1 3 32 20;
    Q5_0 6 32 22;
    Q5_1 7 32 24;
    Q8_0 8 32 34;
    // Two halves and 32 bytes, as ggml and candle have it; the Python package `gguf` says 40. No model file holds it.
    Q8_1 9 32 36;
    Q2_K 10 256 84;
    Q3_K 11 256 110;
    Q4_K 12 256 144;
    Q5_K 13 256 176;
    Q6_K 14 256 210;
    Q8_K 15 256 292;
    IQ2_XXS 16 256 66;
    IQ2_XS 17 256 74;
    IQ3_XXS 18 256 98;
    IQ1_S 19 256 50;
    IQ4_NL 20 32 18;
    IQ3_S 21 256 110;
    IQ2_S 22 256 82;
    IQ4_XS 23 256 136;
    I8 24 1 1;
    I16 25 1 2;
    I32 26 1 4;
    I64 27 1 8;
    F64 28 1 8;
    IQ1_M 29 256 56;
    BF16 30 1 2;
    TQ1_0 34 256 54;
    TQ2_0 35 256 66;
    MXFP4 39 32 17;
    NVFP4 40 64 36;
    Q1_0 41 128 18;
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_leads_back_to_its_type() {
        for &kind in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(kind.id()), Some(kind));
        }
        // Removed from ggml: Q4_2, Q4_3 and the interleaved Q4_0.
        for removed in [4, 5, 31, 32, 33, 36, 37, 38] {
            assert_eq!(GgmlType::from_id(removed), None);
        }
    }
}
