"""Count how many bytes a weight sync sends."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """The amount of data that one sync sends to each worker. The self-test is not included."""

    num_bytes: int = 0  # bytes of all chunks as they travel
    num_words: int = 0  # 16-bit words in the chunks that were compared with those of the last version
    num_changed: int = 0  # number of these words that have changed

    def take_metrics(self) -> dict[str, float]:
        """Return `weight_sync_bytes`, and `weight_sync_changed_share` if tensors were compared.

        Then start counting from 0.
        """
        metrics = {"weight_sync_bytes": float(self.num_bytes)}
        if self.num_words:
            metrics["weight_sync_changed_share"] = self.num_changed / self.num_words
        self.num_bytes = 0
        self.num_words = 0
        self.num_changed = 0
        return metrics
