"""What several benchmarks share: the reference adapter and prompts, and what was measured of one H200."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # every linear layer of a block
STUDENT_PROMPT, TEACHER_PROMPT = 200, 600  # tokens
WEIGHT_BYTES = 3.44e9  # bf16 weights of the Qwen3-1.7B shape that a decode step reads
COPY_BYTES_PER_S = 4.18e12  # measured copy bandwidth
