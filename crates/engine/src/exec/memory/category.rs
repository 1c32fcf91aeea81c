//! Categories of memory in reports.

/// Purpose of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryCategory {
    /// Parameters, in their stored precision and in that of the computation.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// State of the optimizer.
    Optimizer,
    /// Activations and their gradients.
    Activations,
    /// Parameters and activations of the teacher.
    Teacher,
    /// Samples on the device.
    Data,
}

impl MemoryCategory {
    /// All categories.
    pub const ALL: [MemoryCategory; 6] = [
        MemoryCategory::Weights,
        MemoryCategory::Gradients,
        MemoryCategory::Optimizer,
        MemoryCategory::Activations,
        MemoryCategory::Teacher,
        MemoryCategory::Data,
    ];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            MemoryCategory::Weights => "weights",
            MemoryCategory::Gradients => "gradients",
            MemoryCategory::Optimizer => "optimizer",
            MemoryCategory::Activations => "activations",
            MemoryCategory::Teacher => "teacher",
            MemoryCategory::Data => "data",
        }
    }
}
