"""What layers keep for their backward: chosen before the first step, and kept on the GPU or in the host's memory."""
