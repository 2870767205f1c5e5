//! Sets of instructions that the kernels of the int8 mode are written for. All give the same bits.

/// What a kernel may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, on any processor.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2 and its dot products of bytes.
    AvxVnni,
    /// AVX-512 with dot products of bytes.
    Avx512,
}

impl Isa {
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512];

    /// Whether this processor has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let is_avx2 =
            || is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        match self {
            Self::Portable => true,
            Self::Avx2 => is_avx2(),
            Self::AvxVnni => is_avx2() && is_x86_feature_detected!("avxvnni"),
            Self::Avx512 => {
                is_avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
    }

    /// Whether this processor has it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }
}
