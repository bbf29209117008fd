"""Separates mistakes of the annotation from those of the detector, by how much more often confident predictions
disagree with the annotation than their scores explain.

The probability that the detector is wrong falls with the score. It is modelled as a logistic function of the log-odds
of the score, whose slope and offset are fitted, so that scores need not be probabilities. Mistakes of the annotation
contradict a constant share of the predictions, whatever their score. Curve and share are fitted together to the
predictions of all scores. If the curve alone fits as well, all disagreements are attributed to the detector. (This is a
psychometric function with a lapse rate: Wichmann and Hill 2001.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from toolkit.evaluation.matches import Matches
from toolkit.tools.report.suspects import MATCH_IOU, Suspect, thresholds_of_classes

MAX_OWN_SHARE = 0.2  # largest share of the detector's own mistakes among the doubtful suspects
MIN_CONFIDENCE = 0.05  # predictions below it say nothing about confident ones
# Of confident predictions: above it the detector itself is more likely wrong than the annotation.
MAX_CONFIDENT_SHARE = 0.25
MIN_LIKELIHOOD_GAIN = 5.41  # twice the gain in log-likelihood that chance gives to one of a hundred exact annotations
SCORE_RESOLUTION = 1e-6  # scores are distinguished up to this distance from 0 and 1
BIN_WIDTH = 0.1  # in log-odds


@dataclass(frozen=True)
class Doubt:
    """An estimate of how many of the suspects (see `suspects`) are mistakes of the annotation.

    Attributes:
        suspects: number of suspects that have a prediction; all other numbers are about these.
        count: number of the strongest suspects that are probably mistakes of the annotation: the longest beginning of
            the list of which at most a fifth are expected to be mistakes of the detector; 0 if the detector's own
            errors explain the list.
        own_in_count: expected number of mistakes of the detector among these.
        own_in_rest: expected number of mistakes of the detector among the other suspects.
    """

    suspects: int
    count: int
    own_in_count: float
    own_in_rest: float


def doubt(matches: Matches, found: Sequence[Suspect]) -> Doubt:
    """Estimate how many of the suspects are mistakes of the annotation, and not of the detector.

    found: result of `suspects`. Suspects without a prediction are ignored: they may be objects that were missed.
    """
    rows = np.array([suspect.det for suspect in found if suspect.det >= 0], np.int64)
    nothing = Doubt(len(rows), 0, 0.0, float(len(rows)))
    if not len(rows):
        return nothing
    log_odds, is_wrong = _evidence(matches, rows)
    bin_numbers = np.round(log_odds / BIN_WIDTH).astype(np.int64)
    bins, which = np.unique(bin_numbers, return_inverse=True)
    right = np.bincount(which, minlength=len(bins), weights=~is_wrong)
    wrong = np.bincount(which, minlength=len(bins), weights=is_wrong)
    counts = np.stack([right, wrong])
    centres = bins * BIN_WIDTH
    own_alone = _fit(centres, counts, with_share=False)
    both = _fit(centres, counts, with_share=True)
    if 2 * (own_alone.loss - both.loss) < MIN_LIKELIHOOD_GAIN or both.share > MAX_CONFIDENT_SHARE:
        return nothing
    own = 1 - both.is_annotation(_log_odds(matches.found.scores[rows]))
    expected = np.cumsum(own)
    places = np.arange(1, len(rows) + 1)
    enough = np.flatnonzero(expected <= MAX_OWN_SHARE * places)
    count = int(places[enough[-1]]) if len(enough) else 0
    return Doubt(
        len(rows),
        count,
        float(own[:count].sum()),
        float(own[count:].sum()),
    )


def _evidence(m: Matches, suspects: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) log-odds of the scores of predictions, and (N,) bool: whether each contradicts the annotation.

    Wrong predictions on a box that another prediction finds, and confident ones that are not suspects, are left out:
    duplicates and confusions say nothing about the annotation.
    """
    is_suspect = np.zeros(len(m.found), bool)
    is_suspect[suspects] = True
    is_confident = m.found.scores > thresholds_of_classes(m)[m.found.labels]
    is_found = np.zeros(len(m.truth), bool)
    is_found[m.at_half[m.right]] = True
    is_again = np.zeros(len(m.found), bool)
    is_again[m.det[(m.iou >= MATCH_IOU) & is_found[m.gt]]] = True
    of_detector = ~m.right & ~is_suspect & (is_confident | is_again)
    used = m.counts & (m.found.scores > MIN_CONFIDENCE) & ~of_detector
    return _log_odds(m.found.scores[used]), ~m.right[used]


def _log_odds(scores: np.ndarray) -> np.ndarray:
    return logit(np.clip(scores.astype(np.float64), SCORE_RESOLUTION, 1 - SCORE_RESOLUTION))


@dataclass(frozen=True)
class _Fit:
    """A model in which a prediction is contradicted with probability share + (1 - share) × expit(-(slope × log_odds +
    offset)).

    loss: negative log-likelihood.
    """

    slope: float
    offset: float
    share: float
    loss: float

    def is_annotation(self, log_odds: np.ndarray) -> np.ndarray:
        """Return, for predictions that are contradicted, the probability that the annotation is the reason."""
        own = (1 - self.share) * expit(-(self.slope * log_odds + self.offset))
        return self.share / np.maximum(self.share + own, 1e-12)


def _fit(log_odds: np.ndarray, counts: np.ndarray, with_share: bool) -> _Fit:
    """Fit the model to counts (2, B) of predictions that are right and that are contradicted, in bins of `log_odds`
    (B,)."""

    def fit_of(values: np.ndarray) -> _Fit:
        slope = float(np.exp(np.clip(values[0], -5, 5)))
        share = float(expit(values[2])) if with_share else 0.0
        wrong = share + (1 - share) * expit(-(slope * log_odds + values[1]))
        wrong = np.clip(wrong, 1e-9, 1 - 1e-9)
        return _Fit(
            slope,
            float(values[1]),
            share,
            -float((counts * np.log([1 - wrong, wrong])).sum()),
        )

    options = {"maxiter": 2000, "xatol": 1e-4, "fatol": 1e-4}
    fits = []
    for offset in (-1.0, 0.0, 1.0):
        start = [0.0, offset, -4.0] if with_share else [0.0, offset]
        found = minimize(lambda values: fit_of(values).loss, start, method="Nelder-Mead", options=options)
        fits.append(fit_of(found.x))
    return min(fits, key=lambda fit: fit.loss)
