"""Fill in the middle (arXiv 2207.14255): rearranged documents teach a model to write between a prefix and a suffix."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


class Text(NamedTuple):
    """A text to encode separately."""

    text: str
    begins: bool
    """Whether it begins a document, before which some tokenizers put a space."""


@dataclass(frozen=True)
class FillInTheMiddle:
    """Cuts a share `rate` of the documents at two random characters into prefix, middle, suffix, and rearranges them:

        <prefix> prefix <suffix> suffix <middle> middle      PSM
        <prefix> <suffix> suffix <middle> prefix middle      SPM, in the form that the paper trains jointly with PSM

    A share `spm_rate` of these becomes SPM. The choice depends only on a document's digest.
    """

    rate: float
    spm_rate: float
    prefix_id: int
    middle_id: int
    suffix_id: int

    def parts(self, text: str, key: bytes) -> list[int | Text]:
        """The document as texts to encode separately, and token ids between them. Only the prefix begins the document,
        even if it is empty, because a model that fills in a middle continues other text.
        """
        numbers = hashlib.blake2b(key, digest_size=32, person=b"fill-in-middle").digest()
        whether, which, *cuts = (int.from_bytes(numbers[i : i + 8], "big") / 2**64 for i in range(0, 32, 8))
        if whether >= self.rate:
            return [Text(text, begins=True)]
        first, second = sorted(int(cut * (len(text) + 1)) for cut in cuts)
        prefix = Text(text[:first], begins=True)
        middle, suffix = Text(text[first:second], begins=False), Text(text[second:], begins=False)
        if which < self.spm_rate:
            return [self.prefix_id, self.suffix_id, suffix, self.middle_id, prefix, middle]
        return [self.prefix_id, prefix, self.suffix_id, suffix, self.middle_id, middle]
