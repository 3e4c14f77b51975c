"""Fill in the middle (arXiv 2207.14255): documents rearranged, so that a model learns to write between a prefix and a
suffix.
"""

import hashlib
from dataclasses import dataclass

TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


@dataclass(frozen=True)
class FillInTheMiddle:
    """Of the documents a share `rate` is cut at two random characters into prefix, middle and suffix, and becomes

        <prefix> prefix <suffix> suffix <middle> middle         (PSM) <prefix> <suffix> suffix <middle> prefix middle
        (SPM, in the form that the paper trains jointly with PSM)

    a share `spm_rate` of them the latter. What happens to a document depends on its digest alone.
    """

    rate: float
    spm_rate: float
    prefix_id: int
    middle_id: int
    suffix_id: int

    def parts(self, text: str, key: bytes) -> list[int | str]:
        """The document as texts, each to be encoded on its own, and token ids between them."""
        numbers = hashlib.blake2b(key, digest_size=32, person=b"fill-in-middle").digest()
        whether, which, *cuts = (int.from_bytes(numbers[i : i + 8], "big") / 2**64 for i in range(0, 32, 8))
        if whether >= self.rate:
            return [text]
        first, second = sorted(int(cut * (len(text) + 1)) for cut in cuts)
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        if which < self.spm_rate:
            return [self.prefix_id, self.suffix_id, suffix, self.middle_id, prefix, middle]
        return [self.prefix_id, prefix, self.suffix_id, suffix, self.middle_id, middle]
