// Plays the clip on the stage, with a button and a slider.

import { $ } from "./dom.js";

export class Player {
  constructor(stage) {
    Object.assign(this, { stage, clip: null });
    $("play").addEventListener("click", () => (this.clip.paused ? this.play() : this.pause()));
    $("position").addEventListener("input", () => this.seek(Number($("position").value)));
    stage.canvas.addEventListener("seek", (event) => this.seek(event.detail));
  }

  show(clip) {
    this.clip = clip;
    this.stage.show(clip);
    $("player").hidden = false;
    $("position").max = String(clip.duration);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) this.pause();
    else this.play();
  }

  hide() {
    this.clip?.pause();
    this.clip = null;
    $("player").hidden = true;
  }

  play() {
    this.clip.play();
    $("play").textContent = "Pause";
    const { clip } = this;
    const step = () => {
      if (this.clip !== clip) return;
      this.draw();
      if (!clip.paused) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  pause() {
    this.clip.pause();
    $("play").textContent = "Play";
    this.draw();
  }

  /** Stop at a time in seconds. */
  seek(time) {
    if (!this.clip) return;
    this.pause();
    this.clip.time = time;
    this.clip.source.addEventListener?.("seeked", () => this.draw(), { once: true });
    this.draw();
  }

  draw() {
    this.stage.scheduleDraw();
    $("position").value = String(this.clip.time);
    $("clip-time").textContent = `${this.clip.time.toFixed(1)} s of ${this.clip.duration.toFixed(1)} s`;
  }
}
