"""The parts of `llm-pretrain parity`: the cells, their promises, launching, comparing, the result."""
