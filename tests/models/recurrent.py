"""Recurrent nets: an LSTM language model and a two-way GRU tagger."""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


class LanguageModel(nn.Module):
    """Table, LSTM layers, linear head."""

    def __init__(self, vocabulary, width, hidden, layers):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens):
        return self.head(self.lstm(self.table(tokens))[0])


class Tagger(nn.Module):
    """Table, two-way GRU, linear head."""

    def __init__(self, vocabulary, width, hidden, tags):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, hidden, bidirectional=True)
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, tokens):
        return self.head(self.gru(self.table(tokens))[0])


def lstm_language_model(vocabulary=512, width=32, hidden=64, layers=2, tokens=16, batch=4):
    """A small LSTM language model."""
    return LanguageModel(vocabulary, width, hidden, layers), (torch.randint(0, vocabulary, (batch, tokens)),)


def gru_tagger(vocabulary=512, width=32, hidden=48, tags=9, tokens=16, batch=4):
    """A small GRU tagger; time is the first dim."""
    return Tagger(vocabulary, width, hidden, tags), (torch.randint(0, vocabulary, (tokens, batch)),)
