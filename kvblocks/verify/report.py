"""What a walk did without finding a fault."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """Counts of one `run`. Check them: a rare event that was never met was not tested.

    num_hit_tokens: tokens that were not computed. num_possible_tokens: those that some ended request had computed in
    full blocks before, evicted or not. met: how often each event happened.
    """

    seed: int
    num_steps: int = 0
    num_walks: int = 0
    num_hit_tokens: int = 0
    num_possible_tokens: int = 0
    num_prompt_tokens: int = 0
    met: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, number: int = 1) -> None:
        """Count `number` events of the kind `what`."""
        self.met[what] = self.met.get(what, 0) + number

    def __str__(self) -> str:
        met = ", ".join(f"{number} {what}" for what, number in sorted(self.met.items()))
        return (
            f"{self.num_steps} calls in {self.num_walks} walks from seed {self.seed}: no fault.\n"
            f"{self.num_hit_tokens} of {self.num_prompt_tokens} prompt tokens were hits;"
            f" {self.num_possible_tokens} had been computed in full blocks before.\nMet: {met}."
        )
