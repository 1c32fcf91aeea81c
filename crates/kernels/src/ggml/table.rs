//! The table of block types.

/// Calls a macro with the table of block types, the largest first. A row has the name in llama.cpp, the names
/// of the functions that encode and decode it, the id in files, the elements and bytes of a block, the use of
/// importance, and a description.
#[macro_export]
macro_rules! block_types {
    ($callback:ident) => {
        $callback! {
            Q8_0 q8_0 8 SMALL 34 Unused "8.5 bits per weight: one scale per 32 weights";
            Q6_K q6_k 14 LARGE 210 Optional "6.56 bits per weight: blocks of 256 with quantized scales";
            Q5_1 q5_1 7 SMALL 24 Optional "6 bits per weight: a scale and a minimum per 32 weights";
            Q5_0 q5_0 6 SMALL 22 Optional "5.5 bits per weight: one scale per 32 weights";
            Q5_K q5_k 13 LARGE 176 Optional "5.5 bits per weight: blocks of 256 with quantized scales and minima";
            Q4_1 q4_1 3 SMALL 20 Optional "5 bits per weight: a scale and a minimum per 32 weights";
            Q4_0 q4_0 2 SMALL 18 Optional "4.5 bits per weight: one scale per 32 weights";
            Q4_K q4_k 12 LARGE 144 Optional "4.5 bits per weight: blocks of 256 with quantized scales and minima";
            IQ4_NL iq4_nl 20 SMALL 18 Optional "4.5 bits per weight: indices into a codebook of 16 values, one scale per 32 weights";
            IQ4_XS iq4_xs 23 LARGE 136 Optional "4.25 bits per weight: the codebook of IQ4_NL in blocks of 256 with quantized scales";
            MXFP4 mxfp4 39 SMALL 17 Unused "4.25 bits per weight: 4-bit floats (E2M1), one power of two per 32 weights";
            Q3_K q3_k 11 LARGE 110 Optional "3.44 bits per weight: blocks of 256 with quantized scales";
            IQ3_S iq3_s 21 LARGE 110 Optional "3.44 bits per weight: points of a grid of four values in blocks of 256 with quantized scales";
            IQ3_XXS iq3_xxs 18 LARGE 98 Required "3.06 bits per weight: points of a smaller grid of four values";
            Q2_K q2_k 10 LARGE 84 Optional "2.63 bits per weight: blocks of 256 with quantized scales and minima";
            IQ2_S iq2_s 22 LARGE 82 Required "2.56 bits per weight: points of a grid of eight values in blocks of 256 with quantized scales";
            IQ2_XS iq2_xs 17 LARGE 74 Required "2.31 bits per weight: points of a smaller grid of eight values";
            IQ2_XXS iq2_xxs 16 LARGE 66 Required "2.06 bits per weight: points of the smallest grid of eight values";
            TQ2_0 tq2_0 35 LARGE 66 Unused "2.06 bits per weight: ternary values, one scale per 256 weights";
            IQ1_M iq1_m 29 LARGE 56 Required "1.75 bits per weight: shifted points of a ternary grid of eight values, scales per 16 weights";
            TQ1_0 tq1_0 34 LARGE 54 Unused "1.69 bits per weight: ternary values, five in a byte";
            IQ1_S iq1_s 19 LARGE 50 Required "1.56 bits per weight: shifted points of a ternary grid of eight values, scales per 32 weights";
        }
    };
}
