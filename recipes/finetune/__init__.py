"""Fine-tuning of a causal model of transformers on instructions: in full, with adapters, or from a teacher."""
