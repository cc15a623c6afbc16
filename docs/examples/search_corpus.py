"""SEARCH CORPUS: questions about a text corpus, whose passages the policy has to search.

`corpus` is a folder of Markdown or text files; here the documentation of Pixelis. For your own, derive a class.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import Field
from sklearn.feature_extraction.text import TfidfVectorizer

from pixelis.errors import OperationError
from pixelis.operations import Environment, EnvironmentAction, EnvironmentResult, OperationArguments

PASSAGES, LONGEST = 3, 600
"""Passages of a result, and characters of each."""


class SearchArguments(OperationArguments):
    """``query``: the words to look for."""

    query: str = Field(min_length=1, max_length=200, description="words to look for")


class Search(EnvironmentAction):
    """One search."""

    name = "search"
    description = f"Show the {PASSAGES} passages of the corpus that match a query best."
    Arguments = SearchArguments


class SearchCorpus(Environment):
    """The policy searches as often as it likes and then answers; the reward is that of its answer."""

    name = "search_corpus"
    actions = (Search,)
    corpus = Path(__file__).parents[1]

    def reset(self, question, media, seed):
        """Open the corpus, which all episodes of a process share."""
        self.passages, self.vectorizer, self.index = opened(self.corpus)
        return EnvironmentResult(f"A corpus of {len(self.passages)} passages can be searched.")

    def execute(self, action):
        """The best passages by the cosine of their TF-IDF vectors, with the names of their files."""
        scores = (self.index @ self.vectorizer.transform([action.arguments["query"]]).T).toarray()[:, 0]
        best = [i for i in scores.argsort()[::-1][:PASSAGES].tolist() if scores[i] > 0]
        if not best:
            raise OperationError("no passage has these words, try others", code="nothing_found")
        found = [self.passages[i] for i in best]
        return EnvironmentResult("\n\n".join(f"[{file}] {text[:LONGEST]}" for file, text in found))


@functools.cache
def opened(corpus: Path):
    """The passages (file, text) of a folder, the vectorizer, and their vectors, float64 [passages, words]."""
    files = sorted(path for path in corpus.glob("*") if path.suffix in (".md", ".txt"))
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in files]
    passages = [(name, part.strip()) for name, text in texts for part in text.split("\n\n") if part.strip()]
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    return passages, vectorizer, vectorizer.fit_transform(text for _, text in passages)
